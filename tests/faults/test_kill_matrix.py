"""Every kind of end, of every kind of process, at every moment: who is left, which exit code, which cause is named.

One replica of two echo ranks stands for all: the processes are real, and only the model is missing. Rank 1 is held
at the moment in question, and then the victim gets its signal. `make test` runs one cell for each moment, in which
every pair of victim and signal comes up; `make test-full` runs all.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from signal import Signals

import pytest

from phalanx.shm.exit_codes import ExitCode
from phalanx.shm.stack_dump import is_stopped
from phalanx.workers.config import ExecutorConfig
from support.children import is_gone, wait_until
from support.echo_replica import EchoReplica, hold_at_import
from support.echo_worker import CLOSE, START_PHASES, Fault

KILL, TERM, STOP = Signals.SIGKILL, Signals.SIGTERM, Signals.SIGSTOP
MOMENTS = ("import", "process group", "weights", "profile", "idle", "step", "collective", "draining")
STARTING = ("import", *START_PHASES)
SAMPLE = {
    ("import", "core", KILL),
    ("process group", "worker", KILL),
    ("weights", "worker", TERM),
    ("profile", "core", STOP),
    ("idle", "core", TERM),
    ("step", "core", KILL),
    ("collective", "worker", KILL),
    ("draining", "worker", STOP),
}
CELLS = [
    pytest.param(
        moment,
        victim,
        sent,
        id=f"{moment}-{victim}-{sent.name}",
        marks=[] if (moment, victim, sent) in SAMPLE else pytest.mark.full,
    )
    for moment in MOMENTS
    for victim in ("core", "worker")
    for sent in (KILL, TERM, STOP)
]
NAMED = "dp0 tp1"
SHORT_START_S = 8.0
SHORT_STEP_S = 3.0
"""The one timeout that a cell waits for: long enough to come to the moment on a busy machine."""


def executor_config(moment: str, victim: str, sent: Signals) -> ExecutorConfig:
    """Timeouts that never pass, but for the one that must notice what the kernel does not tell."""
    is_silent = victim == "worker" and sent is not KILL
    return ExecutorConfig(
        request_ring_bytes=1 << 16,
        reply_ring_bytes=1 << 16,
        start_timeout_s=SHORT_START_S if is_silent and sent is STOP and moment in STARTING else 60.0,
        step_timeout_s=SHORT_STEP_S if is_silent and moment in ("idle", "step", "collective") else 60.0,
        stop_timeout_s=1.0,
    )


def faults_of(moment: str) -> list[Fault]:
    match moment:
        case "step":
            return [
                Fault(action="wait_for_peers", rank=0, step=2),
                Fault(action="hang", rank=1, step=2),
            ]
        case "collective":
            return [Fault(action="wait_for_peers", rank=rank, step=2) for rank in (0, 1)]
        case "draining":
            return [Fault(action="hang", rank=1, step=CLOSE)]
        case "import":
            return []
        case "idle":
            return [Fault(action="wait_for_peers", rank=0, step=1)]
        case _:
            return [Fault(action="hang", rank=1, step=moment)]


@pytest.fixture
def replica(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EchoReplica]:
    """A replica that has come to the cell's moment."""
    moment, victim, sent = (request.node.callspec.params[name] for name in ("moment", "victim", "sent"))
    if moment == "import":
        monkeypatch.syspath_prepend(str(tmp_path))
        hold_at_import(tmp_path)
    replica = EchoReplica(tmp_path, faults_of(moment), executor_config(moment, victim, sent))
    try:
        if moment not in STARTING:
            replica.wait_ready()
        if moment in ("step", "collective"):
            replica.send_request()
        if moment == "draining":
            replica.core.terminate()
        if moment != "idle":
            replica.wait_held()
        yield replica
    finally:
        replica.close()


def expected_end(moment: str, sent: Signals) -> tuple[int, tuple[str, ...]]:
    """Exit code of the engine core, and words of its reason, when rank 1 was the victim."""
    if moment == "draining":
        return ExitCode.OK, ()
    if moment in STARTING:
        if sent is STOP:
            return ExitCode.BOOT_FAILED, (f"{NAMED} (in {moment})", "deadline")
        return ExitCode.BOOT_FAILED, (NAMED, f"signal {sent.value}", f"last phase: {moment}")
    if sent is KILL:
        return ExitCode.WORKER_LOST, (f"{NAMED} was killed by signal 9",)
    if sent is STOP:
        return ExitCode.WORKER_LOST, (f"{NAMED} made no progress", "stopped by a signal")
    if moment == "idle":
        # It left as it was asked to, though not by its executor.
        return ExitCode.WORKER_LOST, (f"{NAMED} exited with status 0",)
    # Deaf to SIGTERM, as a call into a library is.
    return ExitCode.WORKER_LOST, ("made no progress",)


@pytest.mark.parametrize(("moment", "victim", "sent"), CELLS)
def test_nothing_survives_and_the_first_cause_is_named(
    replica: EchoReplica, moment: str, victim: str, sent: Signals
) -> None:
    pids = replica.worker_pids()
    assert NAMED in pids  # of those that drain, the other may have left

    target = replica.core.pid if victim == "core" else pids[NAMED]
    os.kill(target, sent)
    if sent is STOP:
        wait_until(lambda: is_stopped(target), timeout_s=10.0)

    if victim == "worker":
        if moment == "idle" and sent is STOP:
            replica.send_request()
        exitcode, words = expected_end(moment, sent)
        ended, reason = replica.wait_end()
        assert ended == exitcode, reason
        for word in words:
            assert word in reason
    elif sent is KILL:
        assert replica.wait_end()[0] == -KILL
    elif sent is TERM and moment in STARTING:
        assert replica.wait_end()[0] == -TERM
    elif sent is TERM and moment in ("idle", "draining"):
        assert replica.wait_end()[0] == ExitCode.OK
    else:
        # Stopped, or in a step that does not end: whoever stops it has to insist.
        assert replica.core.stop(reason="test", timeout_s=0.5) == -KILL

    wait_until(lambda: all(map(is_gone, pids.values())), timeout_s=5.0, what="the end of all ranks")
    assert not [name for name in os.listdir("/dev/shm") if "phalanx" in name]


def test_the_sample_has_every_moment_and_every_pair_of_victim_and_signal() -> None:
    assert {moment for moment, _, _ in SAMPLE} == set(MOMENTS)
    assert {(victim, sent) for _, victim, sent in SAMPLE} == {
        (victim, sent)
        for victim in ("core", "worker")
        for sent in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
    }
