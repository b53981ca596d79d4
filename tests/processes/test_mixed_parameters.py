"""Any mix of parameters, valid ones and wrong ones, side by side on a cluster that is short of blocks and places."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.children import wait_until
from support.launch import TINY_MODEL, running_cluster

NUM_CLIENTS = 8
SCHEMAS: list[Any] = [
    {"type": "integer"},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"enum": ["a", "b", 1]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
]
TEXTS = ["a", "Hello world", "the ", "é🌶", "\n", " ", "\u200d", "{", "\0b", "x" * 50]


def make_body(rng: random.Random, *, is_chat: bool) -> dict[str, Any]:
    def token() -> int:
        return rng.randrange(384) if rng.random() < 0.97 else rng.choice([-1, 10**6])

    def text() -> str:
        return rng.choice(TEXTS)

    def a_few(make: Callable[[], Any]) -> list[Any]:
        return [make() for _ in range(rng.randrange(1, 4))]

    def form() -> dict[str, Any]:
        return rng.choice(
            [{"choice": ["a", "bb"]}, {"regex": "[ab]{2,5}"}, {"regex": "("}, {"json": rng.choice(SCHEMAS)}]
        )

    fields: dict[str, Callable[[], Any]] = {
        "max_tokens": lambda: rng.choice([1, 2, 20, 60]),
        "temperature": lambda: rng.choice([0, 1e-9, 0.7, 2]),
        "top_p": lambda: rng.choice([1, 0.5, 1e-9]),
        "top_k": lambda: rng.choice([-1, 1, 5, 10**12]),
        "min_p": lambda: rng.choice([0, 0.1, 1]),
        "seed": lambda: rng.choice([0, -(2**63), 2**63 - 1, 2**63]),
        "n": lambda: rng.choice([1, 2, 3]),
        "stop": lambda: rng.choice([text(), a_few(text)]),
        "stop_token_ids": lambda: a_few(token),
        "ignore_eos": lambda: rng.random() < 0.5,
        "min_tokens": lambda: rng.choice([0, 1, 5]),
        "logit_bias": lambda: {str(token()): rng.choice([-100, 100, 5.5])},
        "presence_penalty": lambda: rng.choice([-2, 2]),
        "frequency_penalty": lambda: rng.choice([-2, 2]),
        "repetition_penalty": lambda: rng.choice([0.5, 1.5, 1e6]),
        "allowed_token_ids": lambda: a_few(token),
        "bad_words": lambda: a_few(text),
        "prompt_logprobs": lambda: rng.choice([0, 3]),
        "truncate_prompt_tokens": lambda: rng.choice([1, 5, -1]),
        "skip_special_tokens": lambda: rng.random() < 0.5,
        "include_stop_str_in_output": lambda: rng.random() < 0.5,
        "priority": lambda: rng.choice([0, 5, -3]),
        "cache_salt": lambda: rng.choice(["s", "t"]),
        "timeout_s": lambda: rng.choice([0.05, 30]),
        "stream": lambda: rng.random() < 0.5,
        "structured_outputs": form,
    }
    if is_chat:
        fields |= {"logprobs": lambda: True, "max_completion_tokens": lambda: rng.choice([1, 9])}
    else:
        fields |= {"logprobs": lambda: rng.choice([0, 5, 21]), "echo": lambda: rng.random() < 0.5}
        fields |= {"best_of": lambda: rng.choice([1, 2, 4])}
    body = {name: fields[name]() for name in rng.sample(sorted(fields), rng.randrange(7))}
    if is_chat:
        return {"messages": [{"role": "user", "content": text()}], "max_tokens": 8, **body}
    prompts: list[Any] = [text() * 3, a_few(token), [text(), text()], [[token()], [token(), token()]], [1]]
    return {"prompt": rng.choice(prompts), "max_tokens": 8, **body}


async def ask(client: httpx.AsyncClient, rng: random.Random) -> str:
    """Send one request, and return what came of it: a status, or "left"."""
    is_chat = rng.random() < 0.3
    body = make_body(rng, is_chat=is_chat)
    leaves_after_s = rng.random() * 0.2 if rng.random() < 0.1 else 60.0
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    try:
        async with asyncio.timeout(leaves_after_s):
            response = await client.post(path, content=json.dumps(body))
    except TimeoutError:
        assert leaves_after_s < 1.0, f"no answer to {body}"
        return "left"
    assert response.status_code in (200, 400, 408, 429), (body, response.text)
    if response.status_code == 400:
        assert response.json()["error"]["param"], (body, response.text)
    elif response.status_code == 200 and body.get("stream"):
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""], (body, events[-3:])
    elif response.status_code == 200:
        check_whole(body, response.json()["choices"])
    return str(response.status_code)


def check_whole(body: dict[str, Any], choices: list[dict[str, Any]]) -> None:
    for choice in choices:
        assert choice["finish_reason"] in ("stop", "length")
        if "text" in choice and (logprobs := choice["logprobs"]) is not None:
            offsets = logprobs["text_offset"]
            assert offsets == sorted(offsets), (body, choice)
            assert len(offsets) == len(logprobs["tokens"]) == len(logprobs["token_logprobs"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_requests", "seed"),
    [(120, 11), *(pytest.param(1000, seed, marks=pytest.mark.full) for seed in range(3))],
)
def test_no_mix_of_parameters_ends_a_process_or_leaves_a_block_in_use(
    tmp_path: Path, num_requests: int, seed: int
) -> None:
    settings = ["cache.num_blocks=60", "scheduler.max_num_seqs=4", "scheduler.max_num_batched_tokens=32"]
    settings += ["scheduler.max_num_waiting=30", "scheduler.check_worker_rows=true"]
    arguments = [part for setting in settings for part in ("--set", setting)]

    async def run(url: str) -> Counter[str]:
        rng, outcomes = random.Random(seed), Counter[str]()
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:

            async def send() -> None:
                while outcomes.total() < num_requests:
                    outcomes[await ask(client, rng)] += 1

            await asyncio.gather(*[send() for _ in range(NUM_CLIENTS)])
        return outcomes

    with running_cluster(tmp_path, str(TINY_MODEL), "--device", "cpu", *arguments) as cluster:
        outcomes = asyncio.run(run(cluster.url))

        def values_of(name: str) -> set[str]:
            lines = httpx.get(f"{cluster.url}/metrics").text.splitlines()
            return {line.rpartition(" ")[2] for line in lines if line.startswith(name)}

        wait_until(
            lambda: values_of("phalanx_kv_blocks_free{") == values_of("phalanx_kv_blocks_total{"),
            timeout_s=10,
            what="all blocks are free",
        )
        assert values_of("phalanx_process_restarts_total{") == {"0.0"}
        assert "Traceback" not in cluster.stderr, cluster.story()
    assert outcomes["200"] > num_requests / 3, outcomes
