"""A cluster of two replicas of two ranks under many clients, good and bad. Tiny model, real processes."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from support.children import listening_addresses
from support.launch import TINY_MODEL, Cluster, running_cluster

NUM_CLIENTS = 64
MAX_TOKENS = 24

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    arguments = [
        str(TINY_MODEL),
        "--tp",
        "2",
        "--dp",
        "2",
        "--device",
        "cpu",
        "--set",
        "cache.num_blocks=600",
    ]
    with running_cluster(
        tmp_path_factory.mktemp("cluster"), *arguments, "--served-model-name", "tiny"
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    return [text[index * 90 : index * 90 + 60 + index] for index in range(NUM_CLIENTS)]


async def stream_text(client: AsyncOpenAI, prompt: str) -> str:
    chunks = await client.completions.create(
        model="tiny", prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, stream=True
    )
    texts, reasons = [], []
    async for chunk in chunks:
        texts.append(chunk.choices[0].text)
        reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] in ("length", "stop")
    assert set(reasons[:-1]) <= {None}
    return "".join(texts)


async def leave_early(client: AsyncOpenAI, prompt: str) -> None:
    chunks = await client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=400,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for _ in chunks:
        await chunks.close()
        break


def test_samples_and_forms_of_answers_come_from_every_replica(cluster: Cluster, prompts: list[str]) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }

    async def run() -> tuple[list[Any], Any, Any]:
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            formed = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="tiny",
                        messages=[{"role": "user", "content": prompt}],
                        max_tokens=60,
                        response_format={
                            "type": "json_schema",
                            "json_schema": {"name": "answer", "schema": schema},
                        },
                    )
                    for prompt in prompts[:8]
                )
            )
            together = await client.completions.create(
                model="tiny", prompt=prompts[0], max_tokens=12, n=3, seed=5, temperature=1.0
            )
            third = await client.completions.create(
                model="tiny", prompt=prompts[0], max_tokens=12, seed=7, temperature=1.0
            )
            return formed, together, third

    formed, together, third = asyncio.run(run())

    for answer in formed:
        value = json.loads(answer.choices[0].message.content)
        assert isinstance(value["ok"], bool)
        assert value["n"] in (1, 2, 3)
        assert answer.choices[0].finish_reason == "stop"
    assert together.choices[2].text == third.choices[0].text
    assert together.usage.prompt_tokens == third.usage.prompt_tokens


def test_64_streams_are_complete_and_none_is_mixed_up(cluster: Cluster, prompts: list[str]) -> None:
    async def run() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*(stream_text(client, prompt) for prompt in prompts))
            alone = [await stream_text(client, prompt) for prompt in prompts]
        return together, alone

    together, alone = asyncio.run(run())
    assert together == alone
    assert len(set(together)) > NUM_CLIENTS // 2


def test_clients_that_leave_free_their_blocks(cluster: Cluster, prompts: list[str]) -> None:
    cluster.wait_all_blocks_free(2)

    async def run() -> list[str | None]:
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(
                *(
                    leave_early(client, prompt) if index % 2 else stream_text(client, prompt)
                    for index, prompt in enumerate(prompts)
                )
            )

    asyncio.run(run())

    cluster.wait_all_blocks_free(2)


def test_both_replicas_take_part(cluster: Cluster) -> None:
    text = httpx.get(f"{cluster.url}/metrics").text
    steps = {
        line.split()[0]: float(line.split()[1])
        for line in text.splitlines()
        if line.startswith("phalanx_engine_steps_total{")
    }
    assert len(steps) == 2
    assert min(steps.values()) > 0


def test_every_way_to_choose_tokens_works_from_each_ranks_part_of_the_vocabulary(
    cluster: Cluster, prompts: list[str]
) -> None:
    """Rows that are sampled in parts and rows that need all of it, together: each is what it is alone."""
    wishes: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 3, "extra_body": {"repetition_penalty": 1.3}},
        {"temperature": 1.2, "seed": 1, "frequency_penalty": 1.5, "logprobs": 0},
        {"temperature": 0.8, "seed": 2, "top_p": 0.9, "presence_penalty": 0.7},
        {"temperature": 0.9, "seed": 3, "top_p": 0.9, "extra_body": {"top_k": 20, "min_p": 0.01}},
        {"temperature": 1.0, "seed": 4, "logit_bias": {"40": 100}, "logprobs": 1},
        {"temperature": 1.0, "seed": 5, "logprobs": 0, "extra_body": {"allowed_token_ids": [50, 51, 52]}},
        {
            "temperature": 1.0,
            "seed": 6,
            "logprobs": 2,
            "echo": True,
            "extra_body": {"bad_words": ["e", "the"]},
        },
        {"temperature": 1.0, "seed": 7, "extra_body": {"min_tokens": 10, "prompt_logprobs": 2}},
    ]

    async def run(is_together: bool) -> list[Any]:
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            calls = [
                client.completions.create(model="tiny", prompt=prompt, max_tokens=MAX_TOKENS, **wish)
                for prompt, wish in zip(prompts, wishes, strict=False)
            ]
            return list(await asyncio.gather(*calls)) if is_together else [await call for call in calls]

    together, alone = asyncio.run(run(True)), asyncio.run(run(False))

    for first, second, prompt in zip(together, alone, prompts, strict=False):
        assert first.choices[0].text == second.choices[0].text
        logprobs, again = first.choices[0].logprobs, second.choices[0].logprobs
        if logprobs is None:
            continue
        assert logprobs.tokens == again.tokens
        assert logprobs.token_logprobs[1:] == pytest.approx(again.token_logprobs[1:], abs=1e-4)
        is_echoed = logprobs.token_logprobs[0] is None
        assert len(logprobs.tokens) == first.usage.completion_tokens + is_echoed * first.usage.prompt_tokens
        assert "".join(logprobs.tokens).startswith(prompt) is is_echoed
    assert len(together[7].choices[0].prompt_logprobs) == together[7].usage.prompt_tokens
    assert len(set(together[5].choices[0].logprobs.tokens)) <= 3


BAD_BODIES = [
    ({"logprobs": 21}, "logprobs"),
    ({"min_p": 2}, "min_p"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"stop_token_ids": [10**6], "min_tokens": 1}, "stop_token_ids"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "five"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"prompt": "word " * 5000}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"temperature": 9}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop": ""}, "stop"),
    ({"seed": "x"}, "seed"),
]


@pytest.mark.parametrize(("change", "field"), BAD_BODIES, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_named_and_the_next_request_works(
    cluster: Cluster, change: dict[str, object], field: str
) -> None:
    body = {"model": "tiny", "prompt": "Licensed under", "max_tokens": 4, "temperature": 0}

    refused = httpx.post(f"{cluster.url}/v1/completions", json={**body, **change})
    accepted = httpx.post(f"{cluster.url}/v1/completions", json=body)

    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == field
    assert accepted.status_code == 200
    assert accepted.json()["choices"][0]["text"]


def test_an_unknown_model_is_404_and_names_the_field(cluster: Cluster) -> None:
    response = httpx.post(f"{cluster.url}/v1/completions", json={"model": "gpt-9", "prompt": "x"})

    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"\xff\xfe", b""])
def test_a_body_that_is_no_json_object_is_400(cluster: Cluster, body: bytes) -> None:
    response = httpx.post(
        f"{cluster.url}/v1/completions", content=body, headers={"content-type": "application/json"}
    )

    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_the_chat_endpoint_streams_role_text_finish_and_usage(cluster: Cluster) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Licensed under the"}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{cluster.url}/v1/chat/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]

    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0]["finish_reason"] in ("length", "stop")
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] <= 8


def test_health_ready_and_models_answer(cluster: Cluster) -> None:
    assert httpx.get(f"{cluster.url}/health").status_code == 200
    assert httpx.get(f"{cluster.url}/ready").status_code == 200
    assert httpx.get(f"{cluster.url}/v1/models").json()["data"][0]["id"] == "tiny"


def test_the_tables_of_phases_and_ranks_are_printed(cluster: Cluster) -> None:
    for dp_rank in range(2):
        for tp_rank in range(2):
            assert cluster.stdout.count(f"dp{dp_rank} tp{tp_rank}") == 3, cluster.stdout
    assert "weights" in cluster.stdout


def test_nothing_listens_but_the_one_address(cluster: Cluster) -> None:
    """Engine cores, workers and the coordinator talk through the private folder, and what is inherited."""
    listening = listening_addresses([cluster.process.pid, *cluster.tree()])

    port = int(cluster.url.rpartition(":")[2])
    assert listening == {("tcp", f"0100007F:{port:04X}")}
