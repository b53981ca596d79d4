"""Several API servers in front of two replicas: connections reach all of them, and only a dead one's own are lost.

One cluster for each number of servers, and for the whole file; each test leaves it whole again.
"""

import asyncio
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from support.children import is_gone, wait_until
from support.launch import TINY_MODEL, Cluster, running_cluster
from support.streams import counters
from support.worker_faults import HOOK, POISON_TOKEN_ID

NUM_STREAMS = 16
MAX_TOKENS = 120
BACK_S = 60.0
KEY = "open sesame"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)],
)
def num_servers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def cluster(num_servers: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "key").write_text(KEY)
    arguments = [str(TINY_MODEL), "--dp", "2", "--device", "cpu", "--served-model-name", "tiny"]
    arguments += ["--api-servers", str(num_servers), "--admin-key-file", str(folder / "key")]
    settings = ("cluster.hang_timeout_s=5", "cluster.max_restart_backoff_s=0.5", f"executor.hooks=['{HOOK}']")
    with running_cluster(folder, *arguments, *(word for one in settings for word in ("--set", one))) as it:
        yield it


def servers(cluster: Cluster) -> dict[str, int]:
    pids = cluster.pids()
    return {
        title.removeprefix("phalanx "): pid for title, pid in pids.items() if title.startswith("phalanx api")
    }


def num_sockets(pid: int) -> int:
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return sum(link.startswith("socket:") for link in links)


async def stream(client: httpx.AsyncClient, index: int, started: Callable[[], None]) -> str | None:
    """One stream over a connection of its own: its text, None when the connection broke."""
    body = {"model": "tiny", "prompt": f"You may obtain a copy of the License at {index}", "ignore_eos": True}
    body |= {"max_tokens": MAX_TOKENS, "temperature": 0.8, "seed": index, "stream": True}
    pieces: list[str] = []
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not pieces and line:
                    started()
                pieces.append(line)
    except httpx.TransportError:
        return None
    assert pieces[-2] == "data: [DONE]" or pieces[-1] == "data: [DONE]", pieces[-3:]
    return "".join(re.findall(r'"text":"((?:[^"\\]|\\.)*)"', "\n".join(pieces)))


def stream_all(cluster: Cluster, strike: Callable[[], None] = lambda: None) -> list[str | None]:
    """Stream all at once; call `strike` when every one has begun."""

    async def run() -> list[str | None]:
        num_started = 0

        def started() -> None:
            nonlocal num_started
            num_started += 1
            if num_started == NUM_STREAMS:
                strike()

        async with fresh_connections(cluster.url) as client:
            return await asyncio.gather(*(stream(client, index, started) for index in range(NUM_STREAMS)))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[str | None]:
    return stream_all(cluster)


def fresh_connections(url: str) -> httpx.AsyncClient:
    """A client whose every request has a connection of its own, so that many at once reach every server."""
    return httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_keepalive_connections=0))


def ask_at_once(
    cluster: Cluster, ask: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]], count: int
) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with fresh_connections(cluster.url) as client:
            return await asyncio.gather(*(ask(client) for _ in range(count)))

    return asyncio.run(run())


def is_whole(cluster: Cluster) -> bool:
    answers = ask_at_once(cluster, lambda client: client.get("/cluster"), 4)
    return all(process["state"] == "ready" for answer in answers for process in answer.json()["processes"])


def test_connections_reach_every_server_and_requests_every_replica(
    cluster: Cluster, num_servers: int
) -> None:
    before = {role: num_sockets(pid) for role, pid in servers(cluster).items()}
    assert set(before) == {f"api{index}" for index in range(num_servers)}
    per_server: dict[str, int] = {}

    async def run() -> Counter[str]:
        body = {"model": "tiny", "max_tokens": 4, "ignore_eos": True}
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60, limits=limits) as client:
            prompts = (f"{index} of them" for index in range(32))
            asked = (client.post("/v1/completions", json={**body, "prompt": prompt}) for prompt in prompts)
            answers = await asyncio.gather(*asked)
            now = {role: num_sockets(pid) for role, pid in servers(cluster).items()}
            per_server.update({role: now[role] - before[role] for role in now})
            assert [answer.status_code for answer in answers] == [200] * 32
            return Counter(answer.headers["X-Phalanx-Replica"] for answer in answers)

    per_replica = asyncio.run(run())

    assert min(per_server.values()) >= 32 // num_servers // 2, per_server
    assert set(per_replica) == {"0", "1"}
    assert min(per_replica.values()) >= 8, per_replica


def test_all_servers_tell_the_same_counts_and_each_request_is_counted_once(cluster: Cluster) -> None:
    series = 'phalanx_requests_total{model_name="tiny",route="/tokenize",status="200"}'
    before = counters(cluster).get(series, 0)

    ask_at_once(cluster, lambda client: client.post("/tokenize", json={"prompt": "a"}), 20)

    wait_until(lambda: counters(cluster).get(series, 0) == before + 20, timeout_s=10, what="the last count")
    pages = ask_at_once(cluster, lambda client: client.get("/metrics"), 8)
    assert {line for page in pages for line in page.text.splitlines() if line.startswith(series)} == {
        f"{series} {before + 20:.1f}"
    }


def test_a_killed_server_takes_its_own_connections_along_and_no_others(
    cluster: Cluster, num_servers: int, undisturbed: list[str | None]
) -> None:
    counted, pids = counters(cluster), cluster.pids()
    victim = servers(cluster)["api0"]

    texts = stream_all(cluster, lambda: os.kill(victim, signal.SIGKILL))

    num_broken = texts.count(None)
    assert (num_broken == NUM_STREAMS) if num_servers == 1 else (0 < num_broken < NUM_STREAMS)
    for text, expected in zip(texts, undisturbed, strict=True):
        assert text in (None, expected)
    # At once: the others take connections, or the socket keeps them.
    assert httpx.get(f"{cluster.url}/health", timeout=BACK_S).status_code == 200
    wait_until(lambda: servers(cluster).get("api0", victim) != victim, timeout_s=BACK_S, what="a new server")
    wait_until(lambda: is_whole(cluster), timeout_s=BACK_S, what="all servers")
    after = cluster.pids()
    assert {title for title, pid in pids.items() if after.get(title) != pid} == {"phalanx api0"}
    now = counters(cluster)
    assert all(now[series] >= value for series, value in counted.items())
    assert stream_all(cluster) == undisturbed
    cluster.wait_all_blocks_free(2)


@pytest.mark.full
def test_operators_are_heard_by_every_server_and_obeyed_by_all(
    cluster: Cluster, undisturbed: list[str | None]
) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    texts: list[list[str | None]] = []
    streams = threading.Thread(target=lambda: texts.append(stream_all(cluster)))
    streams.start()

    def states() -> set[tuple[str, str]]:
        answers = ask_at_once(cluster, lambda client: client.get("/cluster"), 8)
        return {tuple(replica["state"] for replica in answer.json()["replicas"]) for answer in answers}

    try:
        for wish, state in (("drain", "withheld"), ("resume", "ready")) * 2:
            answer = httpx.post(
                f"{cluster.url}/admin/replicas/1/{wish}", headers=headers, json={}, timeout=60
            )
            assert answer.status_code == 200, answer.text
            # It was answered when every server had done it.
            assert states() == {("ready", state)}
    finally:
        streams.join(120)
    assert texts == [undisturbed]


@pytest.mark.full
def test_what_one_server_has_found_to_be_poison_all_refuse(cluster: Cluster) -> None:
    body = {"model": "tiny", "prompt": [5, POISON_TOKEN_ID, 7], "max_tokens": 5}
    first = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=200)
    assert (first.status_code, first.json()["error"]["code"]) == (500, "poisonous_request")
    wait_until(lambda: is_whole(cluster), timeout_s=BACK_S, what="both replicas")
    victim = servers(cluster)["api0"]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: is_gone(victim), timeout_s=10, what="the end of a server")
    wait_until(lambda: servers(cluster).get("api0", victim) != victim, timeout_s=BACK_S, what="a new server")
    wait_until(lambda: is_whole(cluster), timeout_s=BACK_S, what="all servers")
    pids = cluster.pids()

    answers = ask_at_once(cluster, lambda client: client.post("/v1/completions", json=body), 8)

    assert {answer.json()["error"]["code"] for answer in answers} == {"poisonous_request"}
    assert cluster.pids() == pids, "an equal one was tried"


@pytest.mark.full
@pytest.mark.parametrize("victim", ["api0", pytest.param("coordinator", marks=pytest.mark.full)])
def test_one_that_hangs_is_replaced(
    cluster: Cluster, num_servers: int, undisturbed: list[str | None], victim: str
) -> None:
    pid = cluster.pids()[f"phalanx {victim}"]
    os.kill(pid, signal.SIGSTOP)
    if num_servers > 1:
        assert stream_all(cluster) == undisturbed

    wait_until(lambda: is_gone(pid), timeout_s=60, what="the end of the stopped process")

    wait_until(lambda: f"phalanx {victim}" in cluster.pids(), timeout_s=BACK_S, what="another one")
    wait_until(lambda: is_whole(cluster), timeout_s=BACK_S, what="all servers")
    assert f"{victim} was killed: {victim} stands still" in cluster.stderr
    assert stream_all(cluster) == undisturbed


@pytest.mark.full
def test_all_servers_finish_what_runs_when_the_cluster_is_stopped(
    tmp_path: Path, num_servers: int, undisturbed: list[str | None]
) -> None:
    arguments = [str(TINY_MODEL), "--dp", "2", "--device", "cpu", "--served-model-name", "tiny"]
    with running_cluster(tmp_path, *arguments, "--api-servers", str(num_servers)) as cluster:
        assert stream_all(cluster, cluster.interrupt) == undisturbed
        pids = cluster.tree()
        assert cluster.wait() == 0, cluster.story()
        cluster.assert_nothing_left(pids)
