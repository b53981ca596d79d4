"""Processes killed under live streams: clients see a pause, never an error, and the texts are the undisturbed ones.

One cluster of two replicas of two ranks for the whole file; each test leaves it whole again.
"""

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.children import wait_until
from support.launch import Cluster
from support.streams import BACK_S, make_prompts, stream_all, streaming_cluster, wait_whole

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with streaming_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return make_prompts()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, prompts: list[str]) -> list[str | None]:
    return stream_all(cluster, prompts)


def kill(cluster: Cluster, *titles: str) -> None:
    pids = cluster.pids()
    for title in titles:
        os.kill(pids[f"phalanx {title}"], signal.SIGKILL)


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(["dp0 tp1"], marks=pytest.mark.full),
        pytest.param(["dp1 tp0"], marks=pytest.mark.full),
        pytest.param(["dp0"], marks=pytest.mark.full),
        pytest.param(["coordinator"], marks=pytest.mark.full),
        ["dp0 tp0", "dp1 tp1"],
    ],
    ids=lambda victims: "+".join(victims),
)
def test_streams_go_on_with_the_same_texts(
    cluster: Cluster, prompts: list[str], undisturbed: list[str | None], victims: list[str]
) -> None:
    before = cluster.pids()

    texts = stream_all(cluster, prompts, lambda: kill(cluster, *victims))

    assert texts == undisturbed
    for victim in victims:
        assert f"{victim} was killed by signal 9" in cluster.stderr
    wait_whole(cluster, *(before[f"phalanx {victim}"] for victim in victims))
    assert stream_all(cluster, prompts) == undisturbed


def test_a_process_that_cannot_be_started_again_for_the_moment_ends_nobody_else(
    cluster: Cluster, prompts: list[str], undisturbed: list[str | None]
) -> None:
    supervisor, victim = cluster.process.pid, cluster.pids()["phalanx coordinator"]
    before = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path(f"/proc/{supervisor}/fd").iterdir())
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (highest + 1, before[1]))
    try:
        kill(cluster, "coordinator")
        sentence = "coordinator did not start: [Errno 24] Too many open files; starting it again in"
        wait_until(lambda: sentence in cluster.stderr, timeout_s=20, what="a start that fails")
        assert stream_all(cluster, prompts) == undisturbed
    finally:
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, before)

    wait_whole(cluster, victim)


def test_a_killed_api_server_is_back_and_no_connection_is_refused(
    cluster: Cluster, prompts: list[str], undisturbed: list[str | None]
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
    assert stream_all(cluster, prompts) == undisturbed
    cluster.wait_all_blocks_free(2)
