"""Every way to fail, of every process, at every moment, under 32 live streams: no client notices more than a pause.

One cluster of two replicas of two ranks for the whole file; each cell leaves it whole again. Workers fail at an exact
moment of a step, by a hook (support/worker_faults.py); other processes get a signal while the streams are at that
moment. `make test` runs a few cells, `make test-full` all of them.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.children import wait_until
from support.launch import Cluster, running_cluster
from support.streams import (
    ARGUMENTS,
    counters,
    make_prompts,
    stream_all,
    streaming_cluster,
    wait_whole,
)
from support.worker_faults import (
    ACTIONS,
    EXIT_STATUS,
    HOOK,
    MOMENTS,
    POISON_TOKEN_ID,
    ask_for_fault,
    fault_file,
)

HANG_TIMEOUT_S = 5.0
SETTINGS = (f"executor.hooks=['{HOOK}']", f"cluster.hang_timeout_s={HANG_TIMEOUT_S}")
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

pytestmark = pytest.mark.timeout(300)


def cells(every: list[tuple[str, str, str]], sample: set[tuple[str, str, str]]) -> list[object]:
    assert sample <= set(every)
    return [
        pytest.param(*cell, id="-".join(cell), marks=[] if cell in sample else pytest.mark.full)
        for cell in every
    ]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with streaming_cluster(tmp_path_factory.mktemp("cluster"), *SETTINGS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return make_prompts()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, prompts: list[str]) -> list[str]:
    return stream_all(cluster, prompts)


@pytest.mark.parametrize(("role", "moment", "action"), cells(WORKER_CELLS, WORKER_SAMPLE))
def test_a_worker_fails(
    cluster: Cluster, prompts: list[str], undisturbed: list[str], role: str, moment: str, action: str
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
    said = cluster.stderr[num_said:]
    assert WORDS[action] in said, said
    assert role in said[: said.index(WORDS[action])], "another one is named first"
    after = counters(cluster)
    assert all(after[series] >= value for series, value in counted.items())


@pytest.mark.parametrize(("role", "moment", "action"), cells(PROCESS_CELLS, PROCESS_SAMPLE))
def test_another_process_fails(
    cluster: Cluster, prompts: list[str], undisturbed: list[str], role: str, moment: str, action: str
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
    said = cluster.stderr[num_said:]
    word = {**WORDS, "exit": "exited with status 0"}[action]
    assert word in said, said
    assert role in said[: said.index(word)]
    after = counters(cluster)
    assert all(after[series] >= value for series, value in counted.items())


def test_poison_is_found_out_and_the_others_go_on(
    cluster: Cluster, prompts: list[str], undisturbed: list[str]
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
    tmp_path: Path, prompts: list[str], undisturbed: list[str], moment: str, action: str
) -> None:
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    with running_cluster(tmp_path, *ARGUMENTS, *words, "--set", "cluster.drain_timeout_s=120") as cluster:

        def strike() -> None:
            cluster.interrupt()
            wait_until(lambda: "finishing running requests" in cluster.stderr, timeout_s=10)
            ask_for_fault(cluster.temp, role="dp0 tp1", moment=moment, action=action)

        assert stream_all(cluster, prompts, strike) == undisturbed
        assert not fault_file(cluster.temp).exists(), "nothing has failed"
        pids = cluster.tree()
        assert cluster.wait() == 0, cluster.story()
        cluster.assert_nothing_left(pids)
