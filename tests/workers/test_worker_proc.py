"""The worker's loop, driven in this process: which call gets which answer, and what ends the loop."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from phalanx.shm.channel import EXECUTOR_RANK, CallSequence, Receiver, Sender
from phalanx.shm.codec import FrameKind
from phalanx.shm.errors import ProtocolError, QueueEmptyError
from phalanx.shm.exit_codes import ExitCode
from phalanx.shm.ring_buffer import RingReader, RingWriter, create_ring
from phalanx.shm.segment import SharedSegment
from phalanx.shm.status_board import Phase, StatusBoard
from phalanx.workers.calls import (
    Call,
    ExecuteModel,
    InitializeKVCache,
    KVCacheInitialized,
    MemoryReport,
    RankMemory,
    Reply,
    StepDone,
    WorkerFailure,
)
from phalanx.workers.worker_proc import PhaseClock, WorkerLoop, read_rank_memory
from support.echo_worker import EchoWorker, Fault, echo_configs, echo_step


class MakeHarness(Protocol):
    def __call__(self, tp_rank: int, faults: list[Fault] | None = None) -> "Harness": ...


class Harness:
    """One worker loop on rank `tp_rank`, with the executor's ends of its rings."""

    def __init__(self, folder: Path, tp_rank: int, faults: list[Fault]) -> None:
        requests = create_ring("test", capacity=1 << 16, num_readers=1)
        replies = create_ring("test", capacity=1 << 16, num_readers=1)
        self.sender = Sender(RingWriter(_again(requests)), epoch=0, rank=EXECUTOR_RANK)
        self.answers = Receiver[Reply | WorkerFailure](
            RingReader(_again(replies), 0), {FrameKind.REPLY: Reply, FrameKind.ERROR: WorkerFailure}
        )
        self._calls = Receiver[Call](RingReader(requests, 0), {FrameKind.REQUEST: Call})
        self._replies = Sender(RingWriter(replies), epoch=0, rank=tp_rank)
        self.board = StatusBoard.create(1)
        self.progress: list[str] = []
        self.clock = PhaseClock(self.board.writer(0), self.progress.append)
        self.has_broken_hook = False
        self.loop = WorkerLoop(
            EchoWorker(echo_configs(folder, 2, faults)[tp_rank], self.clock.begin),
            tp_rank,
            calls=self._calls,
            replies=self._replies,
            sequence=CallSequence(0),
            clock=self.clock,
            read_memory=self._read_memory,
        )

    def serve(self, *calls: Call) -> ExitCode:
        """Send `calls`, close the ring, and serve them."""
        for call_id, call in enumerate(calls, 1):
            self.sender.send(FrameKind.REQUEST, call_id, call)
        self.sender.close()
        return self.loop.run()

    def take_answers(self) -> list[tuple[int, Reply | WorkerFailure]]:
        taken: list[tuple[int, Reply | WorkerFailure]] = []
        try:
            while True:
                with self.answers.receive() as frame:
                    taken.append((frame.header.call_id, frame.message))
        except QueueEmptyError:
            return taken

    def close(self) -> None:
        for end in (self.sender, self.answers, self._calls, self._replies, self.board):
            end.close()

    def _read_memory(self, tp_rank: int) -> RankMemory:
        if self.has_broken_hook:
            raise OSError("no /proc")
        return read_rank_memory(tp_rank)


def _again(segment: SharedSegment) -> SharedSegment:
    return SharedSegment.attach(os.dup(segment.fd), segment.size)


@pytest.fixture
def make_harness(tmp_path: Path) -> Iterator[MakeHarness]:
    made: list[Harness] = []

    def make(tp_rank: int, faults: list[Fault] | None = None) -> Harness:
        made.append(Harness(tmp_path, tp_rank, faults or []))
        return made[-1]

    yield make
    for harness in made:
        harness.close()


def test_rank_0_answers_every_call(make_harness: MakeHarness) -> None:
    harness = make_harness(0)

    assert harness.serve(InitializeKVCache(4), ExecuteModel(echo_step(9)), MemoryReport()) == ExitCode.OK
    (first, kv_cache), (second, step), (third, memory) = harness.take_answers()
    assert (first, second, third) == (1, 2, 3)
    assert isinstance(kv_cache, KVCacheInitialized)
    assert isinstance(step, StepDone)
    assert step.output.sampled_token_ids == [9]
    assert isinstance(memory, RankMemory)
    assert memory.resident_bytes > 0


def test_other_ranks_answer_all_but_steps(make_harness: MakeHarness) -> None:
    harness = make_harness(1)
    harness.serve(InitializeKVCache(4), ExecuteModel(echo_step(9)), MemoryReport())

    assert [call_id for call_id, _ in harness.take_answers()] == [1, 3]
    status = harness.board.read(0)
    assert (status.phase, status.call_id, status.step) == (Phase.STOPPING, 3, 9)


def test_a_step_that_fails_is_told_by_any_rank_and_is_the_last(make_harness: MakeHarness) -> None:
    harness = make_harness(1, [Fault(action="raise", rank=1, step=2)])
    harness.serve(ExecuteModel(echo_step(1)), ExecuteModel(echo_step(2)), MemoryReport())

    ((call_id, failure),) = harness.take_answers()
    assert call_id == 2
    assert isinstance(failure, WorkerFailure)
    assert failure.is_fatal
    assert (failure.tp_rank, failure.phase) == (1, "forward")
    assert failure.error == "ArithmeticError: rank 1 was told to fail"
    assert "echo_worker.py" in failure.traceback


def test_an_answer_that_cannot_be_encoded_is_a_failure_of_its_call(make_harness: MakeHarness) -> None:
    harness = make_harness(0, [Fault(action="garbage", rank=0, step=1)])
    harness.serve(ExecuteModel(echo_step(1)))

    ((_, failure),) = harness.take_answers()
    assert isinstance(failure, WorkerFailure)
    assert "cannot be encoded" in failure.error


def test_a_hook_that_fails_ends_the_call_only(make_harness: MakeHarness) -> None:
    harness = make_harness(0)
    harness.has_broken_hook = True
    harness.serve(MemoryReport(), ExecuteModel(echo_step(1)))

    (_, failure), (_, step) = harness.take_answers()
    assert isinstance(failure, WorkerFailure)
    assert not failure.is_fatal
    assert isinstance(step, StepDone)


def test_a_call_out_of_sequence_ends_the_loop(make_harness: MakeHarness) -> None:
    harness = make_harness(0)
    harness.sender.send(FrameKind.REQUEST, 2, MemoryReport())

    with pytest.raises(ProtocolError, match="call 2 came when call 1 was due"):
        harness.loop.run()


def test_a_call_that_does_not_decode_ends_the_loop(make_harness: MakeHarness) -> None:
    harness = make_harness(0)
    harness.sender.send(FrameKind.REQUEST, 1, {"type": "run_this", "code": "..."})

    with pytest.raises(ProtocolError):
        harness.loop.run()


def test_the_clock_times_the_phases_of_the_start_and_then_tells_the_board_only(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(0)
    clock = harness.clock
    clock.begin("device")
    clock.begin("weights")
    times = clock.end_start()
    clock.begin("forward")

    assert [time.name for time in times] == ["device", "weights"]
    assert all(time.duration_s >= 0 for time in times)
    assert harness.progress == ["device", "weights"]
    assert clock.phase is Phase.FORWARD
