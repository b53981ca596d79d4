"""Two real replicas behind the real balancer: chats stay where their prefix is, also while the coordinator dies."""

import asyncio
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.children import is_gone, wait_until
from support.launch import TINY_MODEL, Cluster, running_cluster
from support.streams import counters

pytestmark = pytest.mark.timeout(300)

NUM_CHATS = 12
NUM_TURNS = 5
NUM_PROMPTS = 40
ANSWER_LENGTHS = (2, 8)
NUM_CLIENTS = 64
Answer = tuple[str, list[int]]
"""Text; tokens of prompt and answer."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    arguments = [str(TINY_MODEL), "--dp", "2", "--device", "cpu", "--set", "cache.num_blocks=600"]
    folder = tmp_path_factory.mktemp("cluster")
    with running_cluster(
        folder, *arguments, "--served-model-name", "tiny", "--set", "cache.block_size=4"
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def text() -> str:
    return (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")


async def complete(client: httpx.AsyncClient, prompt: str, **headers: str) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response


def cached_of(response: httpx.Response) -> tuple[int, int]:
    usage = response.json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def test_chats_find_their_prefix_again_and_both_replicas_work_while_the_coordinator_dies(
    cluster: Cluster, text: str
) -> None:
    coordinator = cluster.pids()["phalanx coordinator"]

    async def chat(client: httpx.AsyncClient, number: int) -> tuple[list[str], int, int]:
        said, replicas, cached, later = text[number * 150 : number * 150 + 60], list[str](), 0, 0
        for turn in range(NUM_TURNS):
            response = await complete(client, said)
            replicas.append(response.headers["X-Phalanx-Replica"])
            if turn:
                hit, asked = cached_of(response)
                cached, later = cached + hit, later + asked
            if (number, turn) == (0, 1):
                os.kill(coordinator, signal.SIGKILL)
            said += text[4000 + number * 20 : 4008 + number * 20]
        return replicas, cached, later

    async def scenario() -> list[tuple[list[str], int, int]]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            return await asyncio.gather(*(chat(client, number) for number in range(NUM_CHATS)))

    chats = asyncio.run(scenario())

    wait_until(lambda: is_gone(coordinator), timeout_s=10, what="the coordinator's end")
    wait_until(lambda: "phalanx coordinator" in cluster.pids(), timeout_s=20, what="a new coordinator")
    # Most of what had been said before was in the cache of the replica that was chosen.
    assert sum(cached for _, cached, _ in chats) > 0.6 * sum(later for _, _, later in chats)
    assert set(Counter(replica for replicas, _, _ in chats for replica in replicas)) == {"0", "1"}
    metrics = httpx.get(f"{cluster.url}/metrics").text
    reasons = re.findall(r'^phalanx_routing_decisions_total\{[^}]*reason="(\w+)"\} (\S+)$', metrics, re.M)
    assert sum(float(count) for _, count in reasons) == NUM_CHATS * NUM_TURNS


def test_a_client_may_name_the_replica_and_ask_why(cluster: Cluster, text: str) -> None:
    async def scenario() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            named = [await complete(client, text[:40], **{"X-Phalanx-Replica": str(rank)}) for rank in (0, 1)]
            body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
            wrong = await client.post("/v1/completions", json=body, headers={"X-Phalanx-Replica": "7"})
            return [*named, wrong, await complete(client, text[:40], **{"X-Phalanx-Explain": "1"})]

    first, second, wrong, explained = asyncio.run(scenario())

    assert [first.headers["X-Phalanx-Replica"], second.headers["X-Phalanx-Replica"]] == ["0", "1"]
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "X-Phalanx-Replica"
    scores = explained.headers["X-Phalanx-Routing-Scores"]
    assert re.fullmatch(r"0=\d+\.\d, 1=\d+\.\d", scores)


@pytest.mark.parametrize(
    "num_requests", [500, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(1200)])]
)
def test_short_requests_are_neither_lost_nor_doubled_nor_mixed_while_the_coordinator_dies(
    cluster: Cluster, text: str, num_requests: int
) -> None:
    prompts = [text[number * 40 : number * 40 + 20 + number % 30] for number in range(NUM_PROMPTS)]
    rng = random.Random(7)
    asked = [(rng.randrange(NUM_PROMPTS), rng.choice(ANSWER_LENGTHS)) for _ in range(num_requests)]
    coordinator = cluster.pids()["phalanx coordinator"]
    before = counters(cluster)

    async def ask(client: httpx.AsyncClient, prompt: str, max_tokens: int) -> Answer:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body["ignore_eos"] = True
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert len(answer["choices"]) == 1
        usage = answer["usage"]
        return answer["choices"][0]["text"], [usage["prompt_tokens"], usage["completion_tokens"]]

    async def scenario() -> tuple[dict[tuple[int, int], Answer], list[Answer | None]]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            alone = {pair: await ask(client, prompts[pair[0]], pair[1]) for pair in sorted(set(asked))}
            num_done = 0

            answers: list[Answer | None] = [None] * num_requests
            waiting = iter(enumerate(asked))

            async def work() -> None:
                nonlocal num_done
                for index, (prompt, max_tokens) in waiting:
                    answers[index] = await ask(client, prompts[prompt], max_tokens)
                    num_done += 1
                    if num_done == num_requests // 2:
                        os.kill(coordinator, signal.SIGKILL)

            await asyncio.gather(*(work() for _ in range(NUM_CLIENTS)))
            return alone, answers

    alone, answers = asyncio.run(scenario())

    wait_until(lambda: is_gone(coordinator), timeout_s=10, what="the coordinator's end")
    wait_until(lambda: "phalanx coordinator" in cluster.pids(), timeout_s=20, what="a new coordinator")
    # What another prompt would have been answered is something else.
    longest = [alone[prompt, most][0] for prompt, most in alone if most == 8]
    assert len(set(longest)) > 0.9 * len(longest)
    wrong = [pair for pair, answer in zip(asked, answers, strict=True) if answer != alone[pair]]
    assert not wrong, f"{len(wrong)} of {num_requests} answers belong to another request"
    after = counters(cluster)

    def grown(name: str, label: str = "") -> float:
        """By how much all series of a counter have grown, those with a label, together."""
        return sum(
            after[series] - before.get(series, 0.0)
            for series in after
            if series.startswith(name) and label in series
        )

    num_all = num_requests + len(alone)
    num_tokens = sum(usage[1] for _, usage in alone.values()) + sum(asked_tokens for _, asked_tokens in asked)
    assert grown("phalanx_routing_decisions_total") == num_all
    assert grown("phalanx_requests_total", 'route="/v1/completions",status="200"') == num_all
    assert grown("phalanx_generation_tokens_total") == num_tokens
    # The engines tell of themselves when something changes, and now and then at rest.
    wait_until(
        lambda: set(cluster.used_blocks().values()) == {0.0}, timeout_s=15, what="all blocks to be free again"
    )
