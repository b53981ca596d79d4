"""Processes killed under live streams: clients see a pause, never an error, and the texts are the undisturbed ones.

One cluster of two replicas of two ranks for the whole file; each test leaves it whole again.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from support.children import wait_until
from support.launch import TINY_MODEL, Cluster, running_cluster

NUM_STREAMS = 32
MAX_TOKENS = 120
BACK_S = 60.0
"""For a process to be back: a worker imports torch."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    arguments = [str(TINY_MODEL), "--tp", "2", "--dp", "2", "--device", "cpu", "--served-model-name", "tiny"]
    arguments += ["--set", "cluster.max_restarts=100", "--set", "cluster.max_restart_backoff_s=0.5"]
    with running_cluster(tmp_path_factory.mktemp("cluster"), *arguments) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    words = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8").split()
    return [" ".join(words[index * 23 : index * 23 + 20 + index]) for index in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, prompts: list[str]) -> list[str]:
    return stream_all(cluster, prompts, lambda: None)


async def stream(client: AsyncOpenAI, index: int, prompt: str, started: Callable[[], None]) -> str:
    # Every second one is drawn at random, from a seed of its own; every fourth has a stop string to look for; every
    # third is penalised for what it has said, and tells of each token.
    is_penalised = index % 3 == 0
    chunks = await client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=0.8 if index % 2 else 0,
        seed=index,
        stop=["zzz never zzz"] if index % 4 == 0 else None,
        frequency_penalty=0.8 if is_penalised else 0,
        logprobs=1 if is_penalised else None,
        stream=True,
        extra_body={"ignore_eos": True, "bad_words": ["the"] if is_penalised else []},
    )
    texts = []
    num_told = 0
    async for chunk in chunks:
        if chunk.choices[0].logprobs is not None:
            num_told += len(chunk.choices[0].logprobs.tokens)
        if len(texts) == 3:
            started()
        texts.append(chunk.choices[0].text)
        last = chunk.choices[0].finish_reason
    assert last == "length"
    assert num_told == (MAX_TOKENS if is_penalised else 0)
    return "".join(texts)


def stream_all(cluster: Cluster, prompts: list[str], strike: Callable[[], None]) -> list[str]:
    """Stream all prompts at once; call `strike` when half of the streams are well under way."""

    async def run() -> list[str]:
        num_started = 0

        def started() -> None:
            nonlocal num_started
            num_started += 1
            if num_started == NUM_STREAMS // 2:
                strike()

        async with AsyncOpenAI(
            base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(
                *(stream(client, index, prompt, started) for index, prompt in enumerate(prompts))
            )

    return asyncio.run(run())


def kill(cluster: Cluster, *titles: str) -> None:
    pids = cluster.pids()
    for title in titles:
        os.kill(pids[f"phalanx {title}"], signal.SIGKILL)


def wait_whole(cluster: Cluster, *gone: int) -> None:
    """Wait until both replicas serve, none of `gone` being one of their processes."""

    def is_whole() -> bool:
        try:
            response = httpx.get(f"{cluster.url}/ready", timeout=5)
        except httpx.TransportError:
            return False
        pids = cluster.pids()
        roles = {"dp0", "dp1", "coordinator", "api0", "dp0 tp0", "dp0 tp1", "dp1 tp0", "dp1 tp1"}
        is_complete = roles <= {title.removeprefix("phalanx ") for title in pids} and not set(gone) & set(
            pids.values()
        )
        return is_complete and response.status_code == 200 and response.json()["replicas_ready"] == 2

    wait_until(is_whole, timeout_s=BACK_S, what="the return of all processes")


@pytest.mark.parametrize(
    "victims",
    [["dp0 tp1"], ["dp1 tp0"], ["dp0"], ["coordinator"], ["dp0 tp0", "dp1 tp1"]],
    ids=lambda victims: "+".join(victims),
)
def test_streams_go_on_with_the_same_texts(
    cluster: Cluster, prompts: list[str], undisturbed: list[str], victims: list[str]
) -> None:
    before = cluster.pids()

    texts = stream_all(cluster, prompts, lambda: kill(cluster, *victims))

    assert texts == undisturbed
    for victim in victims:
        assert f"{victim} was killed by signal 9" in cluster.stderr
    wait_whole(cluster, *(before[f"phalanx {victim}"] for victim in victims))
    assert stream_all(cluster, prompts, lambda: None) == undisturbed


def test_a_killed_api_server_is_back_and_no_connection_is_refused(
    cluster: Cluster, prompts: list[str], undisturbed: list[str]
) -> None:
    url, victim = cluster.url, cluster.pids()["phalanx api0"]
    body = {"model": "tiny", "prompt": prompts[0], "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        kill(cluster, "api0")
        with pytest.raises(httpx.TransportError):
            list(lines)

    # At once: the listening socket is the supervisor's, and the connection waits in its backlog.
    assert httpx.get(f"{url}/health", timeout=BACK_S).status_code == 200
    wait_whole(cluster, victim)
    assert stream_all(cluster, prompts, lambda: None) == undisturbed
    cluster.wait_all_blocks_free(2)
