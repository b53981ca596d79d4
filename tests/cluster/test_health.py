"""Looks at simulated ranks, a second apart: who is stuck, who is hung, and who is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.health import HangMonitor, HangPolicy, Look, Stuck
from phalanx.shm.status_board import Phase, RankStatus

POLICY = HangPolicy(hang_timeout_s=10.0, step_timeout_s=60.0)


def look(
    phase: Phase,
    *,
    since_at: float = 1.0,
    step: int = 3,
    unfinished: int = 0,
    is_worker: bool = False,
    is_stopped: bool = False,
    epoch: int = 0,
) -> Look:
    status = RankStatus(phase=phase, since_at=since_at, call_id=unfinished, step=step)
    return Look(epoch=epoch, status=status, is_worker=is_worker, is_stopped=is_stopped)


def watch(seen: Look, *, seconds: int, role: str = "dp0", monitor: HangMonitor | None = None) -> list[Stuck]:
    """Look at the same thing each second; return what the last look finds."""
    monitor = monitor or HangMonitor(POLICY)
    found: list[Stuck] = []
    for second in range(seconds + 1):
        found = monitor.observe(float(second), {role: seen})
    return found


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.SCHEDULING, Phase.PAUSED, Phase.OTHER])
def test_an_engine_core_that_stops_writing_hangs(phase: Phase) -> None:
    assert watch(look(phase), seconds=4) == []
    (stuck,) = watch(look(phase), seconds=5)
    assert (stuck.role, stuck.child, stuck.phase, stuck.is_hung) == ("dp0", "dp0", phase, False)
    (hung,) = watch(look(phase), seconds=10)
    assert hung.is_hung
    assert hung.problem == f"stands still for 10 s: in {phase}, step 3"


def test_a_long_step_is_no_hang_until_the_executor_has_had_its_say() -> None:
    assert watch(look(Phase.WAITING, unfinished=1), seconds=34) == []
    (stuck,) = watch(look(Phase.WAITING, unfinished=1), seconds=69)
    assert not stuck.is_hung
    (stuck,) = watch(look(Phase.WAITING, unfinished=1), seconds=70)
    assert stuck.is_hung


@pytest.mark.parametrize(
    "phase", [Phase.IMPORT, Phase.WEIGHTS, Phase.PROFILE, Phase.KV_CACHE, Phase.STOPPING]
)
def test_starts_and_stops_have_other_deadlines(phase: Phase) -> None:
    assert watch(look(phase), seconds=1000) == []


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.MASKS])
def test_a_worker_that_is_asked_for_nothing_may_sleep_for_ever(phase: Phase) -> None:
    assert watch(look(phase, is_worker=True), seconds=1000, role="dp0 tp1") == []


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.FORWARD, Phase.WEIGHTS])
def test_a_worker_that_is_stopped_hangs_in_any_phase(phase: Phase) -> None:
    (stuck,) = watch(look(phase, is_worker=True, is_stopped=True), seconds=10, role="dp0 tp1")

    assert stuck.is_hung
    assert (stuck.role, stuck.child) == ("dp0 tp1", "dp0")
    assert "stopped by a signal" in stuck.problem


def test_requests_that_wait_while_no_step_is_made_are_told_though_the_loop_runs() -> None:
    monitor = HangMonitor(POLICY)
    for second in range(71):
        idle = look(Phase.IDLE, since_at=float(second), unfinished=2)
        found = monitor.observe(float(second), {"dp0": idle})

    (stuck,) = found
    assert stuck.is_hung
    assert "2 requests wait and no step is made" in stuck.problem


def test_requests_in_a_pause_wait_as_long_as_it_takes() -> None:
    monitor = HangMonitor(POLICY)
    for second in range(1000):
        paused = look(Phase.PAUSED, since_at=float(second), unfinished=2)
        assert monitor.observe(float(second), {"dp0": paused}) == []


def test_a_new_epoch_starts_with_a_clean_slate() -> None:
    monitor = HangMonitor(POLICY)
    assert watch(look(Phase.IDLE), seconds=10, monitor=monitor)

    assert monitor.observe(11.0, {"dp0": look(Phase.IDLE, epoch=1)}) == []
    assert monitor.observe(15.0, {"dp0": look(Phase.IDLE, epoch=1)}) == []


def test_a_watcher_that_stood_still_itself_blames_nobody() -> None:
    monitor = HangMonitor(POLICY)
    monitor.observe(0.0, {"dp0": look(Phase.IDLE)})

    assert monitor.observe(1000.0, {"dp0": look(Phase.IDLE)}) == []


def test_the_worst_comes_first() -> None:
    monitor = HangMonitor(POLICY)
    monitor.observe(0.0, {"dp0": look(Phase.IDLE)})
    for second in range(1, 12):
        both = {"dp0": look(Phase.IDLE), "dp1": look(Phase.SCHEDULING)}
        found = monitor.observe(float(second), both)

    assert [stuck.role for stuck in found] == ["dp0", "dp1"]


@given(st.lists(st.tuples(st.floats(0.1, 4.0), st.booleans()), max_size=80))
def test_a_rank_that_writes_often_enough_is_never_hung(looks: list[tuple[float, bool]]) -> None:
    monitor = HangMonitor(POLICY)
    now, since_at, silent_s = 0.0, 0.0, 0.0
    monitor.observe(now, {"dp0": look(Phase.SCHEDULING, since_at=since_at)})
    for elapsed_s, has_written in looks:
        now += elapsed_s
        if has_written:
            since_at, silent_s = now, 0.0
        else:
            silent_s += elapsed_s
        found = monitor.observe(now, {"dp0": look(Phase.SCHEDULING, since_at=since_at)})
        if any(stuck.is_hung for stuck in found):
            assert silent_s >= POLICY.hang_timeout_s


def test_an_api_server_or_coordinator_that_stops_writing_hangs_and_has_no_steps() -> None:
    (stuck,) = watch(look(Phase.SERVING, step=0), seconds=6, role="api1")
    assert not stuck.is_hung
    (hung,) = watch(look(Phase.SERVING, step=0, is_stopped=True), seconds=10, role="api1")
    assert (hung.role, hung.child, hung.is_hung) == ("api1", "api1", True)
    assert hung.problem == "stands still for 10 s: stopped by a signal, in serving"
