"""Many live streams on one cluster of two replicas of two ranks, and something that happens while they run."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from support.children import wait_until
from support.launch import TINY_MODEL, Cluster, running_cluster

NUM_STREAMS = 32
MAX_TOKENS = 120
BACK_S = 120.0
"""For a process to be back: a worker imports torch."""
DONE = "data: [DONE]"
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


class StreamFailed(Exception):
    """The server ended a stream with an error."""


async def stream(
    client: httpx.AsyncClient, index: int, prompt: str, started: Callable[[], None], wait: int
) -> str:
    # Every second one is drawn at random, from a seed of its own; every fourth has a stop string to look for; every
    # third is penalised for what it has said, and tells of each token.
    is_penalised = index % 3 == 0
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0.8 if index % 2 else 0,
        "seed": index,
        "stop": ["zzz never zzz"] if index % 4 == 0 else None,
        "frequency_penalty": 0.8 if is_penalised else 0,
        "logprobs": 1 if is_penalised else None,
        "stream": True,
        "ignore_eos": True,
        "bad_words": ["the"] if is_penalised else [],
    }
    texts, num_logprobs, reason, is_done = [], 0, None, False
    # By hand: a client library would need more of the processor than the cluster does.
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise StreamFailed((await response.aread()).decode())
        async for line in response.aiter_lines():
            is_done = is_done or line == DONE
            if not line.startswith("data: ") or is_done:
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise StreamFailed(line)
            if len(texts) == wait:
                started()
            (choice,) = chunk["choices"]
            texts.append(choice["text"])
            reason = choice["finish_reason"]
            num_logprobs += len((choice.get("logprobs") or {}).get("token_logprobs") or [])
    assert is_done
    assert reason == "length"
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

        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=200, limits=limits) as client:

            async def text(index: int, prompt: str) -> str | None:
                try:
                    return await stream(client, index, prompt, started, num_pieces)
                except breaks:
                    return None

            return await asyncio.gather(*(text(index, prompt) for index, prompt in enumerate(prompts)))

    return asyncio.run(run())


def wait_whole(cluster: Cluster, *gone: int) -> None:
    """Wait until all processes serve, none of them being one of `gone`."""

    def is_whole(client: httpx.Client) -> bool:
        try:
            told = client.get("/cluster").json()
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

    # One client for all looks: making one takes the processor from those that are waited for.
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=cluster.url, timeout=5, limits=limits) as client:
        wait_until(lambda: is_whole(client), timeout_s=BACK_S, what="the return of all processes")


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
