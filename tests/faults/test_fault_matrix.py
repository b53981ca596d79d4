"""Every way to fail, of every process, at every moment, under 32 live streams: no client notices more than a pause.

One cluster of two replicas of two ranks behind two API servers for the whole file; each cell leaves it whole again.
Workers fail at an exact moment of a step, by a hook (support/worker_faults.py); other processes get a signal while the
streams are at that moment, or fail from within (support/process_faults.py). `make test` runs a few cells,
`make test-full` all of them.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.children import wait_until
from support.faults import ACTIONS, EXIT_STATUS, ask_for_fault, fault_file
from support.launch import Cluster, running_cluster
from support.process_faults import AT_START, COORDINATOR_MOMENTS, CORE_MOMENTS, SERVER_MOMENTS
from support.streams import (
    ARGUMENTS,
    NUM_STREAMS,
    StreamFailed,
    counters,
    make_prompts,
    stream_all,
    streaming_cluster,
    wait_whole,
)
from support.worker_faults import HOOK, MOMENTS, POISON_TOKEN_ID

HANG_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 120.0
"""Longer than the streams take, also on a busy machine."""
SETTINGS = (
    f"executor.hooks=['{HOOK}']",
    f"cluster.hang_timeout_s={HANG_TIMEOUT_S}",
    f"cluster.drain_timeout_s={DRAIN_TIMEOUT_S}",
)
WORKER_CELLS = [
    (role, moment, action) for role in ("dp0 tp0", "dp1 tp1") for moment in MOMENTS for action in ACTIONS
]
WORKER_SAMPLE = {("dp0 tp0", "prefill", "raise")}
WORDS = {
    "kill": "was killed by signal 9",
    "stop": "stopped by a signal",
    "raise": "a planted fault",
    "exit": f"exited with status {EXIT_STATUS}",
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "exit": signal.SIGTERM}
PIECES_BEFORE = {"prefill": 0, "decode": 3}
PROCESS_CELLS = [
    (role, moment, action)
    for role in ("dp0", "coordinator")
    for moment in ("idle", "prefill", "decode")
    for action in SIGNALS
]
PROCESS_SAMPLE = {("dp0", "decode", "kill")}
SERVER_CELLS = [("api0", moment, action) for moment in ("idle", "prefill", "decode") for action in SIGNALS]
SERVER_SAMPLE = {("api0", "idle", "exit")}
WITHIN_CELLS = [
    (role, moment, action)
    for role, moments in (
        ("dp0", CORE_MOMENTS),
        ("coordinator", COORDINATOR_MOMENTS),
        ("api0", SERVER_MOMENTS),
    )
    for moment in moments
    for action in ("raise", "exit")
]
WITHIN_SAMPLE = {("dp0", "result", "raise")}

pytestmark = pytest.mark.timeout(300)


def cells(every: list[tuple[str, str, str]], sample: set[tuple[str, str, str]]) -> list[object]:
    assert sample <= set(every)
    return [
        pytest.param(*cell, id="-".join(cell), marks=[] if cell in sample else pytest.mark.full)
        for cell in every
    ]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(AT_START))
        with streaming_cluster(tmp_path_factory.mktemp("cluster"), *SETTINGS, num_api_servers=2) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return make_prompts()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, prompts: list[str]) -> list[str | None]:
    return stream_all(cluster, prompts)


def assert_told(cluster: Cluster, num_said: int, role: str, word: str, counted: dict[str, float]) -> None:
    """The log since then names the first cause, `role`, before what became of it; no counter went back."""
    said = cluster.stderr[num_said:]
    assert word in said, said
    assert role in said[: said.index(word)], "another one is named first"
    after = counters(cluster)
    assert all(after[series] >= value for series, value in counted.items())


def assert_only_own_connections_broke(texts: list[str | None], undisturbed: list[str | None]) -> None:
    """Some of the streams were held by a server that died, and the others by another one."""
    assert 0 < texts.count(None) < NUM_STREAMS, texts
    assert all(text in (None, whole) for text, whole in zip(texts, undisturbed, strict=True))


@pytest.mark.parametrize(("role", "moment", "action"), cells(WORKER_CELLS, WORKER_SAMPLE))
def test_a_worker_fails(
    cluster: Cluster, prompts: list[str], undisturbed: list[str | None], role: str, moment: str, action: str
) -> None:
    before, counted, num_said = cluster.pids(), counters(cluster), len(cluster.stderr)
    if moment == "prefill":
        ask_for_fault(cluster.temp, role=role, moment=moment, action=action)

    def strike() -> None:
        if moment != "prefill":
            ask_for_fault(cluster.temp, role=role, moment=moment, action=action)

    texts = stream_all(cluster, prompts, strike)

    assert texts == undisturbed
    assert not fault_file(cluster.temp).exists(), "nothing has failed"
    wait_whole(cluster, before[f"phalanx {role}"])
    assert_told(cluster, num_said, role, WORDS[action], counted)


@pytest.mark.parametrize(("role", "moment", "action"), cells(PROCESS_CELLS, PROCESS_SAMPLE))
def test_another_process_fails(
    cluster: Cluster, prompts: list[str], undisturbed: list[str | None], role: str, moment: str, action: str
) -> None:
    counted, num_said = counters(cluster), len(cluster.stderr)
    victim = cluster.pids()[f"phalanx {role}"]

    def strike() -> None:
        os.kill(victim, SIGNALS[action])

    if moment == "idle":
        strike()
        texts = stream_all(cluster, prompts)
    else:
        texts = stream_all(cluster, prompts, strike, num_pieces=PIECES_BEFORE[moment])

    assert texts == undisturbed
    wait_whole(cluster, victim)
    word = {**WORDS, "exit": "exited with status 0"}[action]
    assert_told(cluster, num_said, role, word, counted)


@pytest.mark.parametrize(("role", "moment", "action"), cells(SERVER_CELLS, SERVER_SAMPLE))
def test_an_api_server_fails(
    cluster: Cluster,
    prompts: list[str],
    undisturbed: list[str | None],
    role: str,
    moment: str,
    action: str,
) -> None:
    counted, num_said = counters(cluster), len(cluster.stderr)
    before = cluster.pids()
    victim = before[f"phalanx {role}"]

    def strike() -> None:
        os.kill(victim, SIGNALS[action])

    if moment == "idle":
        strike()
        texts = stream_all(cluster, prompts)
    else:
        texts = stream_all(
            cluster, prompts, strike, num_pieces=PIECES_BEFORE[moment], breaks=(httpx.TransportError,)
        )

    if moment == "idle" or action == "exit":
        assert texts == undisturbed
    else:
        assert_only_own_connections_broke(texts, undisturbed)
    wait_whole(cluster, victim)
    word = {**WORDS, "stop": "stands still", "exit": "exited with status 0"}[action]
    assert_told(cluster, num_said, role, word, counted)
    others = before.keys() - {f"phalanx {role}"}
    assert {title: cluster.pids().get(title) for title in others} == {
        title: before[title] for title in others
    }


@pytest.mark.parametrize(("role", "moment", "action"), cells(WITHIN_CELLS, WITHIN_SAMPLE))
def test_another_process_fails_from_within(
    cluster: Cluster,
    prompts: list[str],
    undisturbed: list[str | None],
    role: str,
    moment: str,
    action: str,
) -> None:
    counted, num_said = counters(cluster), len(cluster.stderr)
    victim = cluster.pids()[f"phalanx {role}"]

    def strike() -> None:
        ask_for_fault(cluster.temp, role=role, moment=moment, action=action)

    is_server = role.startswith("api")
    # A server that fails, and has not died yet, may still say so to its clients.
    breaks = (httpx.TransportError, StreamFailed) if is_server else ()
    if moment == "admit":
        strike()
        texts = stream_all(cluster, prompts)
    else:
        texts = stream_all(cluster, prompts, strike, breaks=breaks)

    if is_server:
        assert_only_own_connections_broke(texts, undisturbed)
    else:
        assert texts == undisturbed
    wait_until(lambda: not fault_file(cluster.temp).exists(), timeout_s=10, what="the fault")
    wait_whole(cluster, victim)
    assert_told(cluster, num_said, role, WORDS[action], counted)


def test_poison_is_found_out_and_the_others_go_on(
    cluster: Cluster, prompts: list[str], undisturbed: list[str | None]
) -> None:
    """It kills two replicas, then it is answered with an error, and its equals are not even tried."""
    body = {"model": "tiny", "prompt": [5, POISON_TOKEN_ID, 7], "max_tokens": 5}

    def ask() -> httpx.Response:
        return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=200)

    answer = ask()

    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "poisonous_request"
    wait_whole(cluster)
    pids = cluster.pids()
    assert ask().json()["error"]["code"] == "poisonous_request"
    assert all(cluster.pids().get(title) == pid for title, pid in pids.items()), "an equal one was tried"
    assert stream_all(cluster, prompts) == undisturbed


@pytest.mark.full
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("moment", ["decode", "collective"])
def test_a_worker_fails_while_the_cluster_drains(
    tmp_path: Path, prompts: list[str], undisturbed: list[str | None], moment: str, action: str
) -> None:
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    with running_cluster(tmp_path, *ARGUMENTS, *words) as cluster:

        def strike() -> None:
            cluster.interrupt()
            wait_until(lambda: "finishing running requests" in cluster.stderr, timeout_s=10)
            ask_for_fault(cluster.temp, role="dp0 tp1", moment=moment, action=action)

        assert stream_all(cluster, prompts, strike) == undisturbed
        assert not fault_file(cluster.temp).exists(), "nothing has failed"
        pids = cluster.tree()
        assert cluster.wait() == 0, cluster.story()
        cluster.assert_nothing_left(pids)
