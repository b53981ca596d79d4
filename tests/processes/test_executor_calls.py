"""Calls that are not waited for, waited for with a time, or given up; hooks; reports of waits that take long."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from phalanx.shm.errors import (
    CallCancelledError,
    ConfigError,
    ProcessDiedError,
    ProcessError,
    ProcessHungError,
    QueueTimeoutError,
    StartupError,
    WorkerCallError,
)
from phalanx.shm.stack_dump import is_stopped
from phalanx.shm.status_board import Phase
from phalanx.workers.config import ExecutorConfig
from phalanx.workers.memory_report import RankMemory
from phalanx.workers.multiproc_executor import MultiprocExecutor
from support.children import is_gone, wait_until
from support.echo_worker import ECHO_WORKER, START, Fault, echo_configs, echo_masks, echo_step
from support.hooks import Fraction, Quotient


class StartExecutor(Protocol):
    def __call__(self, *faults: Fault, num_ranks: int = 2, **settings: Any) -> MultiprocExecutor: ...


@pytest.fixture
def failures() -> list[ProcessError]:
    """What the executors of this test told by `on_failure`."""
    return []


@pytest.fixture
def start_executor(tmp_path: Path, failures: list[ProcessError]) -> Iterator[StartExecutor]:
    made: list[MultiprocExecutor] = []

    def start(*faults: Fault, num_ranks: int = 2, **settings: Any) -> MultiprocExecutor:
        config = ExecutorConfig(request_ring_bytes=1 << 16, reply_ring_bytes=1 << 16, **settings)
        executor = MultiprocExecutor(
            echo_configs(tmp_path, num_ranks, faults),
            config=config,
            worker_class=ECHO_WORKER,
            on_failure=failures.append,
        )
        made.append(executor)
        executor.start()
        return executor

    yield start
    for executor in made:
        executor.close(reason="the test is over")


def wait_idle(executor: MultiprocExecutor) -> None:
    wait_until(lambda: all(status.phase is Phase.IDLE for status in executor.phases), timeout_s=20)


# Waiting and giving up -------------------------------------------------------------------------------------------


def test_a_wait_may_end_before_the_step_and_be_taken_up_again(
    start_executor: StartExecutor, tmp_path: Path
) -> None:
    executor = start_executor(Fault(action="wait_for_file", rank=0, step=1))
    step = executor.submit_model(echo_step(1))
    with pytest.raises(QueueTimeoutError, match="call 2 has no answer from dp0 tp0"):
        step.result(timeout_s=0.05)
    assert not step.is_done
    (tmp_path / "go").touch()

    assert step.result(timeout_s=20.0).step == 1


def test_a_step_that_was_given_up_is_computed_and_its_answer_is_dropped(
    start_executor: StartExecutor, tmp_path: Path
) -> None:
    executor = start_executor(Fault(action="wait_for_file", rank=0, step=1))
    given_up = executor.submit_model(echo_step(1))
    wanted = executor.submit_model(echo_step(2))
    given_up.cancel()
    (tmp_path / "go").touch()

    assert wanted.result().step == 2
    assert executor.num_dropped_replies == 1
    assert given_up.is_done
    with pytest.raises(CallCancelledError):
        given_up.result()


def test_a_step_that_is_done_cannot_be_given_up(start_executor: StartExecutor) -> None:
    executor = start_executor()
    step = executor.submit_model(echo_step(1))
    wait_until(lambda: step.is_done, timeout_s=20)
    step.cancel()

    assert step.result().step == 1


def test_a_step_behind_others_does_not_pay_for_their_time(start_executor: StartExecutor) -> None:
    executor = start_executor(
        *(Fault(action="nap", rank=0, step=step) for step in range(1, 6)), step_timeout_s=0.7
    )
    steps = [executor.submit_model(echo_step(step)) for step in range(1, 6)]

    # Each naps 0.3 s: the last one is 1.5 s away.
    assert steps[-1].result().step == 5


def test_all_ranks_take_in_the_masks_of_a_step_that_was_sent_before_them(
    start_executor: StartExecutor,
) -> None:
    executor = start_executor()
    for number in range(1, 40, 3):
        plain = executor.submit_model(echo_step(number))
        masked = executor.submit_model(echo_step(number + 1, needs_masks=True))
        assert plain.result().sampled_token_ids == [number]
        assert not masked.is_done
        executor.submit_masks(echo_masks(number + 1, 77))
        behind = executor.submit_model(echo_step(number + 2))
        assert masked.result().sampled_token_ids == [77]
        assert behind.result().step == number + 2
    assert [one.error for one in executor.collective_rpc("memory_report")] == [None, None]


def test_a_death_while_the_ranks_wait_for_masks_ends_the_replica(start_executor: StartExecutor) -> None:
    executor = start_executor()
    step = executor.submit_model(echo_step(1, needs_masks=True))
    wait_until(lambda: all(status.phase is Phase.MASKS for status in executor.phases), timeout_s=20)
    os.kill(executor.pids[1], signal.SIGKILL)

    with pytest.raises(ProcessDiedError, match="tp1"):
        step.result()


def test_a_stop_while_the_ranks_wait_for_masks_is_a_clean_end(start_executor: StartExecutor) -> None:
    executor = start_executor()
    executor.submit_model(echo_step(1, needs_masks=True))
    wait_until(lambda: all(status.phase is Phase.MASKS for status in executor.phases), timeout_s=20)

    executor.close(reason="test")

    assert executor.failure is None


# Hooks -----------------------------------------------------------------------------------------------------------


def test_every_rank_reports_its_memory(start_executor: StartExecutor) -> None:
    executor = start_executor(num_ranks=3)
    outcomes = executor.collective_rpc("memory_report", result_type=RankMemory)

    assert [outcome.tp_rank for outcome in outcomes] == [0, 1, 2]
    reports = [outcome.result for outcome in outcomes if outcome.result is not None]
    assert [report.pid for report in reports] == executor.pids
    for report in reports:
        assert 0 < report.resident_bytes <= report.peak_resident_bytes
        assert report.num_process_threads >= 1
        assert report.model.weight_bytes == 3


def test_a_hook_of_the_configuration_runs_behind_the_steps_under_way(start_executor: StartExecutor) -> None:
    executor = start_executor(hooks=("support.hooks:divide",))
    step = executor.submit_model(echo_step(1))
    outcomes = executor.collective_rpc("divide", Fraction(1.0, 4.0), result_type=Quotient)

    assert [outcome.result for outcome in outcomes] == [Quotient(rank, 0.25) for rank in (0, 1)]
    assert step.is_done
    plain = executor.collective_rpc("divide", {"numerator": 1, "denominator": 2})
    assert plain[1].result == {"tp_rank": 1, "quotient": 0.5}


def test_an_error_in_a_hook_is_that_of_its_rank_and_the_replica_goes_on(
    start_executor: StartExecutor, failures: list[ProcessError]
) -> None:
    executor = start_executor(num_ranks=3, hooks=("support.hooks:fail_on",))
    outcomes = executor.collective_rpc("fail_on", 1, result_type=int)

    assert [outcome.result for outcome in outcomes] == [0, None, 2]
    assert outcomes[1].error == "ValueError: rank 1 was asked to fail"
    assert "support/hooks.py" in outcomes[1].traceback
    assert executor.execute_model(echo_step(1)).step == 1
    assert executor.collective_rpc("fail_on", 5)[1].result == 1
    assert failures == []


def test_a_hook_that_takes_too_long_is_given_up_and_its_answers_are_never_taken(
    start_executor: StartExecutor,
) -> None:
    executor = start_executor(hooks=("support.hooks:nap",))
    outcomes = executor.collective_rpc("nap", 0.5, timeout_s=0.05)

    assert [outcome.error for outcome in outcomes] == ["no answer within 0.05 s"] * 2
    assert [outcome.result for outcome in executor.collective_rpc("nap", 0.0)] == [0, 1]
    assert executor.num_dropped_replies == 2


def test_a_hook_with_the_wrong_argument_or_result_type_says_so(start_executor: StartExecutor) -> None:
    executor = start_executor(hooks=("support.hooks:divide", "support.hooks:unspeakable"))
    (wrong_argument, _) = executor.collective_rpc("divide", "x")
    (no_form, _) = executor.collective_rpc("unspeakable")
    (wrong_result, _) = executor.collective_rpc("divide", Fraction(1, 1), result_type=int)

    assert wrong_argument.error is not None
    assert "ValidationError" in wrong_argument.error
    assert no_form.error is not None
    assert "TypeError" in no_form.error
    assert wrong_result.error is not None
    assert "the result is no" in wrong_result.error


def test_an_unknown_hook_is_refused_before_anything_is_sent(start_executor: StartExecutor) -> None:
    executor = start_executor(hooks=("support.hooks:divide",))
    with pytest.raises(ValueError, match="known are memory_report, sleep, wake, divide"):
        executor.collective_rpc("eval")

    assert executor.execute_model(echo_step(1)).step == 1


def test_a_hook_that_cannot_be_imported_is_an_error_of_the_configuration(
    start_executor: StartExecutor,
) -> None:
    with pytest.raises(ConfigError, match=r"executor.hooks: support.hooks:nonesuch cannot be imported"):
        start_executor(hooks=("support.hooks:nonesuch",))


# Failures that nobody waits for ----------------------------------------------------------------------------------


def test_an_error_after_the_answer_of_rank_0_is_told_while_the_engine_is_idle(
    start_executor: StartExecutor, failures: list[ProcessError], tmp_path: Path
) -> None:
    executor = start_executor(Fault(action="late_raise", rank=1, step=1))
    pids = executor.pids
    assert executor.execute_model(echo_step(1)).step == 1
    (tmp_path / "answered").touch()

    wait_until(lambda: bool(failures), timeout_s=10, what="the report of the failure")
    assert isinstance(failures[0], WorkerCallError)
    assert failures[0].rank == 1
    assert "ArithmeticError: rank 1 was told to fail (in forward of call 2)" in failures[0].detail
    with pytest.raises(WorkerCallError):
        executor.submit_model(echo_step(2))
    assert all(is_gone(pid) for pid in pids)


def test_a_rank_that_stops_reading_while_the_engine_is_idle_is_told(
    start_executor: StartExecutor, failures: list[ProcessError]
) -> None:
    executor = start_executor()
    executor.execute_model(echo_step(1))
    wait_idle(executor)
    # Asked to leave by somebody else than its executor.
    os.kill(executor.pids[1], signal.SIGTERM)

    wait_until(lambda: bool(failures), timeout_s=10, what="the report of the failure")
    assert (failures[0].rank, failures[0].exitcode) == (1, 0)


# Waits that take long --------------------------------------------------------------------------------------------


def stalls(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_wait_that_takes_long_is_reported_with_the_stack_then_after_twice_as_long(
    start_executor: StartExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    executor = start_executor(
        Fault(action="wait_for_peers", rank=0, step=7),
        Fault(action="hang", rank=1, step=7),
        stall_report_s=0.2,
        step_timeout_s=1.7,
    )
    caplog.clear()  # of the start
    pids = executor.pids
    executor.execute_model(echo_step(6))
    with pytest.raises(ProcessHungError):
        executor.execute_model(echo_step(7))

    # After 0.2, 0.6 and 1.4 s, and at the deadline.
    reports = stalls(caplog)
    assert 3 <= len(reports) <= 4
    assert "call 3 has no answer: forward of call 3 (step 7) for" in reports[0]
    assert "(the others: tp0 collective of call 3 (step 7) for" in reports[0]
    assert f"dp0 tp1 host={os.uname().nodename} pid={pids[1]}: forward of call 3" in reports[0]
    assert "echo_worker.py" in reports[0]
    assert "in _hang" in reports[0]


def test_a_stopped_rank_is_reported_as_stopped_without_a_stack(
    start_executor: StartExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    executor = start_executor(stall_report_s=0.2)
    caplog.clear()  # of the start
    executor.execute_model(echo_step(1))
    wait_idle(executor)
    pid = executor.pids[0]
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pid), timeout_s=10)
    step = executor.submit_model(echo_step(2))
    with pytest.raises(QueueTimeoutError):
        step.result(timeout_s=0.5)
    os.kill(pid, signal.SIGCONT)

    assert step.result().step == 2
    (report,) = stalls(caplog)
    assert "stopped by a signal: no stack" in report
    assert "dp0 tp0" in report


def test_idle_time_is_silent_and_does_not_count(
    start_executor: StartExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    executor = start_executor(stall_report_s=0.1)
    caplog.clear()  # of the start
    for step in range(1, 4):
        executor.execute_model(echo_step(step))
        threading.Event().wait(0.15)

    assert stalls(caplog) == []


def test_a_start_that_takes_long_is_reported_with_the_stack_and_the_missing_are_listed(
    start_executor: StartExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    began_at = time.monotonic()
    with pytest.raises(StartupError, match=r"dp0 tp1 \(in weights\), dp0 tp2 \(in process group\)"):
        start_executor(
            Fault(action="hang", rank=1, step=START),
            Fault(action="hang", rank=2, step="process group"),
            num_ranks=3,
            start_timeout_s=6.0,
            stall_report_s=2.0,
        )

    assert time.monotonic() - began_at < 15.0
    last = stalls(caplog)[-1]
    assert "the start waits for 2 of 3 ranks" in last
    assert last.count("in _hang") == 2


# Cores -----------------------------------------------------------------------------------------------------------


def test_a_rank_is_bound_to_the_cores_it_was_given(
    start_executor: StartExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    nodes = {0: frozenset(cores[:1]), 1: frozenset(cores[1:])}
    monkeypatch.setattr("phalanx.workers.worker_group.read_numa_nodes", lambda: nodes)
    monkeypatch.setattr("phalanx.workers.worker_group.read_gpu_nodes", lambda visible_devices: [])
    executor = start_executor(hooks=("support.hooks:cores",))

    bound = [outcome.result for outcome in executor.collective_rpc("cores")]
    assert bound == [cores[:1], cores[1:]]


@pytest.mark.parametrize("asked", [None, "eth7"])
def test_process_groups_meet_on_the_loopback_interface_unless_told_otherwise(
    start_executor: StartExecutor, monkeypatch: pytest.MonkeyPatch, asked: str | None
) -> None:
    names = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    for name in names:
        monkeypatch.delenv(name, raising=False)
        if asked is not None:
            monkeypatch.setenv(name, asked)
    executor = start_executor(hooks=("support.hooks:variables",))

    given = [outcome.result for outcome in executor.collective_rpc("variables", names)]

    # NCCL takes a bare name for the beginning of one.
    assert given == [["lo", "=lo"] if asked is None else [asked, asked]] * 2
