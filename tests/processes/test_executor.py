"""MultiprocExecutor with real processes: work, and every way in which a rank can fail."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec
import pytest

from phalanx.shm.codec import FrameKind
from phalanx.shm.errors import (
    MessageTooLargeError,
    ProcessDiedError,
    ProcessError,
    ProcessHungError,
    QueueClosedError,
    StartupError,
    WorkerCallError,
)
from phalanx.shm.exit_codes import ExitCode
from phalanx.shm.status_board import Phase, StatusBoard
from phalanx.workers.calls import InitializeKVCache
from phalanx.workers.config import CacheConfig, ExecutorConfig, ParallelConfig
from phalanx.workers.multiproc_executor import MultiprocExecutor
from phalanx.workers.worker_group import planned_segments
from support.children import is_gone, wait_until
from support.echo_worker import ECHO_WORKER, KV_CACHE, START, START_PHASES, Fault, echo_configs, echo_step

PAGE_BYTES = os.sysconf("SC_PAGESIZE")
SMALL = ExecutorConfig(
    request_ring_bytes=1 << 16,
    reply_ring_bytes=1 << 16,
    start_timeout_s=30.0,
    step_timeout_s=30.0,
    call_timeout_s=30.0,
    stop_timeout_s=5.0,
)


class MakeExecutor(Protocol):
    def __call__(
        self, *faults: Fault, num_ranks: int = 2, config: ExecutorConfig = SMALL
    ) -> MultiprocExecutor: ...


@pytest.fixture
def make_executor(tmp_path: Path) -> Iterator[MakeExecutor]:
    made: list[MultiprocExecutor] = []

    def make(*faults: Fault, num_ranks: int = 2, config: ExecutorConfig = SMALL) -> MultiprocExecutor:
        executor = MultiprocExecutor(
            echo_configs(tmp_path, num_ranks, faults), config=config, worker_class=ECHO_WORKER
        )
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.close(reason="the test is over")


def assert_all_gone(pids: list[int]) -> None:
    assert pids
    assert all(is_gone(pid) for pid in pids)


# Work ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_steps_are_computed_and_everything_is_gone_after_the_close(
    make_executor: MakeExecutor, num_ranks: int
) -> None:
    executor = make_executor(num_ranks=num_ranks)
    report = executor.start()
    pids = executor.pids

    assert report.num_kv_blocks == 10
    assert (report.block_size, report.max_model_len, report.vocab_size) == (16, 64, 100)
    assert [rank.tp_rank for rank in report.ranks] == list(range(num_ranks))
    assert [rank.pid for rank in report.ranks] == pids
    assert [phase.name for phase in report.ranks[0].phases] == [
        "import",
        *START_PHASES,
        "KV cache",
    ]
    for step in range(1, 20):
        output = executor.execute_model(echo_step(step, num_requests=3))
        assert output.step == step
        assert output.sampled_token_ids == [step] * 3
    executor.close(reason="test")
    executor.close(reason="again")
    assert_all_gone(pids)
    with pytest.raises(QueueClosedError, match="test"):
        executor.execute_model(echo_step(20))


def test_several_steps_may_be_under_way_and_be_asked_for_in_any_order(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.start()
    steps = [executor.submit_model(echo_step(step)) for step in range(1, 9)]

    assert [step.result().step for step in reversed(steps)] == list(range(8, 0, -1))
    assert steps[0].is_done
    assert steps[0].result().step == 1


def test_the_number_of_blocks_can_be_set(tmp_path: Path) -> None:
    configs = echo_configs(tmp_path, 1)
    configs = [msgspec.structs.replace(config, cache=CacheConfig(num_blocks=7)) for config in configs]
    executor = MultiprocExecutor(configs, config=SMALL, worker_class=ECHO_WORKER)

    assert executor.start().num_kv_blocks == 7
    executor.close(reason="test")


@pytest.mark.parametrize("num_host_ranks", [1, 2, 1000])
def test_the_ranks_of_all_replicas_share_the_cores(tmp_path: Path, num_host_ranks: int) -> None:
    configs = [
        msgspec.structs.replace(config, num_host_ranks=num_host_ranks) for config in echo_configs(tmp_path, 1)
    ]
    executor = MultiprocExecutor(configs, config=SMALL, worker_class=ECHO_WORKER)

    threads = executor.start().ranks[0].num_threads
    executor.close(reason="test")

    assert threads == max(1, len(os.sched_getaffinity(0)) // num_host_ranks)


def test_phases_of_the_start_are_told_and_the_board_says_what_ranks_do(tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []
    board = StatusBoard.create(5)
    executor = MultiprocExecutor(
        echo_configs(tmp_path, 2),
        config=SMALL,
        worker_class=ECHO_WORKER,
        board=board,
        first_slot=3,
        on_phase=lambda rank, phase: told.append((rank, phase)),
    )
    executor.start()
    executor.execute_model(echo_step(6))

    assert {(rank, phase) for rank in (0, 1) for phase in ("import", "device", "weights")} <= set(told)
    wait_until(lambda: all(board.read(slot).phase is Phase.IDLE for slot in (3, 4)), timeout_s=20)
    assert [status.step for status in executor.phases] == [6, 6]
    assert board.read(0).phase is Phase.NOT_STARTED
    executor.close(reason="test")
    assert board.read(3).phase is Phase.STOPPING
    board.close()


def test_shared_memory_is_as_planned(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.start()
    plan = planned_segments(SMALL, ParallelConfig(tensor_parallel_size=2), "dp0")
    mapped: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "memfd:phalanx-dp0-" in line:
            begin, _, end = line.split()[0].partition("-")
            mapped[line.split()[5]] = int(end, 16) - int(begin, 16)

    pages = [-(-segment.num_bytes // PAGE_BYTES) * PAGE_BYTES for segment in plan]
    assert sorted(mapped.values()) == sorted(pages)


def test_a_step_larger_than_the_ring_is_computed_in_its_turn(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.start()
    steps = [
        executor.submit_model(echo_step(number, num_requests=5000 if number % 2 else 1))
        for number in range(1, 7)
    ]

    assert [step.result().step for step in steps] == [1, 2, 3, 4, 5, 6]


def test_a_step_that_is_too_large_is_refused_and_the_next_one_works(make_executor: MakeExecutor) -> None:
    executor = make_executor(config=replace(SMALL, max_oversize_bytes=1 << 16))
    executor.start()
    with pytest.raises(MessageTooLargeError):
        executor.submit_model(echo_step(1, num_requests=5000))

    assert executor.execute_model(echo_step(2)).step == 2


def test_idle_workers_use_next_to_no_processor_time_and_are_no_stall(
    make_executor: MakeExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    window_s = 1.0
    executor = make_executor(config=replace(SMALL, stall_report_s=0.9 * window_s))
    executor.start()
    executor.execute_model(echo_step(1))
    caplog.clear()
    used_before = [_processor_s(pid) for pid in executor.pids]
    threading.Event().wait(window_s)

    for pid, before in zip(executor.pids, used_before, strict=True):
        assert (_processor_s(pid) - before) / window_s < 0.02
    # Nobody waited meanwhile: the next step is not late because of it.
    executor.execute_model(echo_step(2))
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def _processor_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


# Failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_step_on_any_rank_ends_all_with_its_traceback(
    make_executor: MakeExecutor, rank: int
) -> None:
    executor = make_executor(
        Fault(action="raise", rank=rank, step=2), Fault(action="wait_for_peers", rank=1 - rank, step=2)
    )
    executor.start()
    pids = executor.pids
    executor.execute_model(echo_step(1))
    step = executor.submit_model(echo_step(2))
    began_at = time.monotonic()
    with pytest.raises(WorkerCallError, match="told to fail") as caught:
        step.result()

    assert time.monotonic() - began_at < 2.0
    assert (caught.value.role, caught.value.rank) == (f"dp0 tp{rank}", rank)
    assert "echo_worker.py" in caught.value.detail
    assert_all_gone(pids)
    with pytest.raises(WorkerCallError):
        executor.submit_model(echo_step(3))
    with pytest.raises(WorkerCallError):
        step.result()


@pytest.mark.parametrize(("action", "exitcode"), [("exit", 9), ("kill", -9)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_in_a_step_wakes_who_waits_and_ends_the_peers(
    make_executor: MakeExecutor, action: str, exitcode: int, rank: int
) -> None:
    executor = make_executor(
        Fault(action=action, rank=rank, step=1), Fault(action="wait_for_peers", rank=1 - rank, step=1)
    )
    executor.start()
    pids = executor.pids
    began_at = time.monotonic()
    with pytest.raises(ProcessDiedError) as caught:
        executor.execute_model(echo_step(1))

    assert time.monotonic() - began_at < 1.0
    assert (caught.value.rank, caught.value.exitcode) == (rank, exitcode)
    assert caught.value.detail == "last phase: forward of call 2"
    assert_all_gone(pids)


def test_a_death_while_idle_is_told_at_once(tmp_path: Path) -> None:
    told: list[ProcessError] = []
    has_failed = threading.Event()

    def on_failure(failure: ProcessError) -> None:
        told.append(failure)
        has_failed.set()

    executor = MultiprocExecutor(
        echo_configs(tmp_path, 2), config=SMALL, worker_class=ECHO_WORKER, on_failure=on_failure
    )
    executor.start()
    pids = executor.pids
    executor.execute_model(echo_step(1))
    os.kill(pids[1], signal.SIGKILL)

    assert has_failed.wait(1.0)
    assert isinstance(executor.failure, ProcessDiedError)
    assert executor.failure.rank == 1
    with pytest.raises(ProcessDiedError, match="signal 9"):
        executor.check()
    assert_all_gone(pids)
    assert len(told) == 1


def test_a_step_after_a_death_is_refused(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.start()
    os.kill(executor.pids[0], signal.SIGKILL)

    with pytest.raises(ProcessDiedError):
        executor.execute_model(echo_step(1))


def test_a_hung_rank_is_named_with_its_phase(make_executor: MakeExecutor) -> None:
    config = ExecutorConfig(request_ring_bytes=1 << 16, reply_ring_bytes=1 << 16, step_timeout_s=0.3)
    executor = make_executor(
        Fault(action="wait_for_peers", rank=0, step=1), Fault(action="hang", rank=1, step=1), config=config
    )
    executor.start()
    pids = executor.pids
    with pytest.raises(ProcessHungError) as caught:
        executor.execute_model(echo_step(1))

    # Both stand still; the one in a collective only waits for the other.
    assert caught.value.rank == 1
    assert "forward of call 2" in caught.value.detail
    assert "collective of call 2" in caught.value.detail
    assert_all_gone(pids)


def test_a_stopped_rank_is_named_as_stopped(make_executor: MakeExecutor) -> None:
    config = ExecutorConfig(request_ring_bytes=1 << 16, reply_ring_bytes=1 << 16, step_timeout_s=0.5)
    executor = make_executor(Fault(action="wait_for_peers", rank=0, step=1), config=config)
    executor.start()
    pids = executor.pids
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(ProcessHungError, match="stopped by a signal") as caught:
        executor.execute_model(echo_step(1))

    assert caught.value.rank == 1
    assert_all_gone(pids)


def test_a_ring_that_nobody_reads_is_a_hung_rank(make_executor: MakeExecutor) -> None:
    config = ExecutorConfig(request_ring_bytes=1 << 16, reply_ring_bytes=1 << 16, step_timeout_s=0.3)
    executor = make_executor(Fault(action="hang", rank=1, step=1), config=config)
    executor.start()

    def submit_until_full() -> None:
        for step in range(1, 1000):
            executor.submit_model(echo_step(step, num_requests=500))

    with pytest.raises(ProcessHungError) as caught:
        submit_until_full()
    assert caught.value.rank == 1


def test_a_death_ends_the_wait_for_room(make_executor: MakeExecutor) -> None:
    executor = make_executor(Fault(action="hang", rank=1, step=1))
    executor.start()
    killer = threading.Timer(0.2, os.kill, (executor.pids[1], signal.SIGKILL))
    killer.start()

    def submit_until_full() -> None:
        for step in range(1, 1000):
            executor.submit_model(echo_step(step, num_requests=500))

    began_at = time.monotonic()
    with pytest.raises(ProcessDiedError) as caught:
        submit_until_full()
    killer.join()
    assert time.monotonic() - began_at < 1.5
    assert caught.value.rank == 1


def test_a_call_that_must_not_come_ends_the_worker(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.start()
    group = executor._group
    assert group is not None
    group.sender.send(FrameKind.REQUEST, 77, InitializeKVCache(1))

    assert group.watch.wait_failure(5.0) is not None
    with pytest.raises(ProcessDiedError, match="call 77 came when call 2 was due") as caught:
        executor.check()
    assert caught.value.exitcode == ExitCode.PROTOCOL


def test_a_death_counts_before_the_errors_of_its_peers(make_executor: MakeExecutor) -> None:
    executor = make_executor(Fault(action="kill", rank=1, step=1), Fault(action="raise", rank=0, step=1))
    executor.start()
    with pytest.raises(ProcessDiedError) as caught:
        executor.execute_model(echo_step(1))

    assert caught.value.rank == 1


# Start and end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(action="raise", rank=1, step=START), "ArithmeticError: rank 1 was told to fail"),
        (Fault(action="exit", rank=1, step=START), "weights"),
        (Fault(action="raise", rank=1, step=KV_CACHE), "ArithmeticError: rank 1 was told to fail"),
        (Fault(action="kill", rank=1, step=KV_CACHE), "KV cache of call 1"),
    ],
)
def test_a_rank_that_does_not_start_ends_all_and_says_why(
    make_executor: MakeExecutor, fault: Fault, words: str
) -> None:
    executor = make_executor(fault)
    with pytest.raises(StartupError, match="did not start") as caught:
        executor.start()

    assert (caught.value.role, caught.value.rank) == ("dp0 tp1", 1)
    assert words in str(caught.value)
    assert executor.pids == []


def test_a_hung_rank_does_not_hold_up_the_close(make_executor: MakeExecutor) -> None:
    config = ExecutorConfig(request_ring_bytes=1 << 16, reply_ring_bytes=1 << 16, stop_timeout_s=0.2)
    executor = make_executor(Fault(action="hang", rank=0, step=1), config=config)
    executor.start()
    pids = executor.pids
    executor.submit_model(echo_step(1))
    began_at = time.monotonic()
    executor.close(reason="test")

    assert time.monotonic() - began_at < 2.0
    assert_all_gone(pids)


def test_a_killed_parent_leaves_no_worker(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "support.executor_parent", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()

    wait_until(lambda: all(is_gone(pid) for pid in pids), timeout_s=5.0)


def test_the_executor_imports_no_torch() -> None:
    program = (
        "import sys, phalanx.workers.executor, phalanx.workers.worker_proc; sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
