"""Many live streams on one cluster of two replicas of two ranks, and something that happens while they run."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from openai import APIConnectionError, AsyncOpenAI

from support.children import wait_until
from support.launch import TINY_MODEL, Cluster, running_cluster

NUM_STREAMS = 32
MAX_TOKENS = 120
BACK_S = 60.0
"""For a process to be back: a worker imports torch."""
CUT_OFF = (APIConnectionError, httpx.TransportError)
"""What a client sees when its API server is gone."""
ARGUMENTS = (str(TINY_MODEL), "--tp", "2", "--dp", "2", "--device", "cpu", "--served-model-name", "tiny")


@contextmanager
def streaming_cluster(folder: Path, *settings: str, num_api_servers: int = 1) -> Iterator[Cluster]:
    """A cluster whose processes may die often. settings: "section.name=value"."""
    servers = f"cluster.num_api_servers={num_api_servers}"
    often = ("cluster.max_restarts=100", "cluster.max_restart_backoff_s=0.5")
    words = [word for setting in (servers, *often, *settings) for word in ("--set", setting)]
    with running_cluster(folder, *ARGUMENTS, *words) as cluster:
        yield cluster


def make_prompts() -> list[str]:
    words = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8").split()
    return [" ".join(words[index * 23 : index * 23 + 20 + index]) for index in range(NUM_STREAMS)]


async def stream(client: AsyncOpenAI, index: int, prompt: str, started: Callable[[], None], wait: int) -> str:
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
    texts, num_logprobs = [], 0
    async for chunk in chunks:
        if len(texts) == wait:
            started()
        texts.append(chunk.choices[0].text)
        last = chunk.choices[0].finish_reason
        if chunk.choices[0].logprobs is not None:
            num_logprobs += len(chunk.choices[0].logprobs.token_logprobs or [])
    assert last == "length"
    assert num_logprobs == (MAX_TOKENS if is_penalised else 0), "log-probabilities are missing, or came twice"
    return "".join(texts)


def stream_all(
    cluster: Cluster,
    prompts: list[str],
    strike: Callable[[], None] = lambda: None,
    *,
    num_pieces: int = 3,
    breaks: tuple[type[Exception], ...] = (),
) -> list[str | None]:
    """Stream all prompts at once; call `strike` when half of the streams have had more than `num_pieces`.

    Returns their texts; None for one that ended in one of `breaks`.
    """

    async def run() -> list[str | None]:
        num_started = 0

        def started() -> None:
            nonlocal num_started
            num_started += 1
            if num_started == NUM_STREAMS // 2:
                strike()

        async with AsyncOpenAI(
            base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=200
        ) as client:

            async def text(index: int, prompt: str) -> str | None:
                try:
                    return await stream(client, index, prompt, started, num_pieces)
                except breaks:
                    return None

            return await asyncio.gather(*(text(index, prompt) for index, prompt in enumerate(prompts)))

    return asyncio.run(run())


def wait_whole(cluster: Cluster, *gone: int) -> None:
    """Wait until all processes serve, none of them being one of `gone`."""

    def is_whole() -> bool:
        try:
            told = httpx.get(f"{cluster.url}/cluster", timeout=5).json()
        except httpx.TransportError:
            return False
        ranks = {
            f"dp{replica['dp_rank']} tp{rank['tp_rank']}"
            for replica in told["replicas"]
            for rank in replica["ranks"]
        }
        roles = {process["role"] for process in told["processes"]}
        pids = cluster.pids()
        is_complete = roles | ranks <= {title.removeprefix("phalanx ") for title in pids}
        return (
            bool(ranks)
            and is_complete
            and not set(gone) & set(pids.values())
            and all(process["state"] == "ready" for process in told["processes"])
        )

    wait_until(is_whole, timeout_s=BACK_S, what="the return of all processes")


def counters(cluster: Cluster) -> dict[str, float]:
    """All counters of the metrics, by series."""
    text = httpx.get(f"{cluster.url}/metrics", timeout=10).text
    names = {
        line.split()[2]
        for line in text.splitlines()
        if line.startswith("# TYPE") and line.endswith("counter")
    }
    rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {series: float(value) for series, _, value in rows if series.partition("{")[0] in names}
