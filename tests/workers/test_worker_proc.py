"""The worker's loop, driven in this process: which call gets which answer, and what ends the loop."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
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
    GiveMasks,
    HookDone,
    InitializeKVCache,
    KVCacheInitialized,
    Reply,
    RunHook,
    StepDone,
    WorkerFailure,
)
from phalanx.workers.hooks import HookRegistry, encode_argument
from phalanx.workers.memory_report import ModelMemory, RankMemory
from phalanx.workers.messages import GrammarMasks, ModelRunnerOutput, SchedulerOutput
from phalanx.workers.step_in_flight import StepInFlight
from phalanx.workers.worker_loop import PhaseClock, WorkerLoop
from support.echo_worker import EchoWorker, Fault, echo_configs, echo_masks, echo_step

MEMORY_REPORT = RunHook("memory_report", encode_argument(None))


class MakeHarness(Protocol):
    def __call__(
        self, tp_rank: int, faults: list[Fault] | None = None, worker_class: type[EchoWorker] = EchoWorker
    ) -> "Harness": ...


class Harness:
    """One worker loop on rank `tp_rank`, with the executor's ends of its rings."""

    def __init__(
        self, folder: Path, tp_rank: int, faults: list[Fault], worker_class: type[EchoWorker]
    ) -> None:
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
        self.failures: list[WorkerFailure] = []
        self.worker: Any = worker_class(echo_configs(folder, 2, faults)[tp_rank], self.clock.begin)
        self.loop = WorkerLoop(
            self.worker,
            calls=self._calls,
            replies=self._replies,
            sequence=CallSequence(0),
            clock=self.clock,
            hooks=HookRegistry(("support.hooks:divide", "support.hooks:unspeakable")),
            tell_failure=self.failures.append,
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
                    taken.append((frame.call_id, frame.message))
        except QueueEmptyError:
            return taken

    def close(self) -> None:
        for end in (self.sender, self.answers, self._calls, self._replies, self.board):
            end.close()


class ComputingDevice(EchoWorker):
    """Computes a step only when it is waited for, or told to; notes what happens in which order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.story: list[str] = []
        self.fails_at = 0

    def begin_step(
        self, scheduler_output: SchedulerOutput, receive_masks: Callable[[], GrammarMasks]
    ) -> StepInFlight:
        self.story.append(f"launch {scheduler_output.step}")
        return ComputedLater(self, super().begin_step(scheduler_output, receive_masks).wait())

    def model_memory(self) -> ModelMemory:
        self.story.append("hook")
        return super().model_memory()


class ComputedLater:
    """Is done once somebody has asked `num_looks` times, or waits."""

    num_looks = 3

    def __init__(self, worker: ComputingDevice, output: ModelRunnerOutput) -> None:
        self._worker = worker
        self._output = output
        self._num_looks = 0

    @property
    def is_done(self) -> bool:
        self._num_looks += 1
        return self._num_looks > self.num_looks

    def wait(self) -> ModelRunnerOutput:
        self._worker.story.append(f"end {self._output.step}")
        if self._output.step == self._worker.fails_at:
            raise ArithmeticError("the device has failed")
        return self._output


def _again(segment: SharedSegment) -> SharedSegment:
    return SharedSegment.attach(os.dup(segment.fd), segment.size)


@pytest.fixture
def make_harness(tmp_path: Path) -> Iterator[MakeHarness]:
    made: list[Harness] = []

    def make(
        tp_rank: int, faults: list[Fault] | None = None, worker_class: type[EchoWorker] = EchoWorker
    ) -> Harness:
        made.append(Harness(tmp_path, tp_rank, faults or [], worker_class))
        return made[-1]

    yield make
    for harness in made:
        harness.close()


def test_rank_0_answers_every_call(make_harness: MakeHarness) -> None:
    harness = make_harness(0)

    assert harness.serve(InitializeKVCache(4), ExecuteModel(echo_step(9)), MEMORY_REPORT) == ExitCode.OK
    (first, kv_cache), (second, step), (third, memory) = harness.take_answers()
    assert (first, second, third) == (1, 2, 3)
    assert isinstance(kv_cache, KVCacheInitialized)
    assert isinstance(step, StepDone)
    assert step.output.sampled_token_ids == [9]
    assert isinstance(memory, HookDone)
    report = msgspec.msgpack.decode(memory.result, type=RankMemory)
    assert (report.tp_rank, report.pid) == (0, os.getpid())
    assert 0 < report.resident_bytes <= report.peak_resident_bytes
    assert report.model.weight_bytes == 3


def test_other_ranks_answer_all_but_steps(make_harness: MakeHarness) -> None:
    harness = make_harness(1)
    harness.serve(InitializeKVCache(4), ExecuteModel(echo_step(9)), MEMORY_REPORT)

    assert [call_id for call_id, _ in harness.take_answers()] == [1, 3]
    status = harness.board.read(0)
    assert (status.phase, status.call_id, status.step) == (Phase.STOPPING, 3, 9)


def test_a_step_waits_for_its_masks_which_nobody_answers(make_harness: MakeHarness) -> None:
    harness = make_harness(0)

    code = harness.serve(
        ExecuteModel(echo_step(1, needs_masks=True)), GiveMasks(echo_masks(1, 77)), ExecuteModel(echo_step(2))
    )

    assert code == ExitCode.OK
    answers = [(call_id, reply.output.sampled_token_ids) for call_id, reply in harness.take_answers()]  # type: ignore[union-attr]
    assert answers == [(1, [77]), (3, [2])]


def test_a_rank_that_waits_for_masks_leaves_when_the_executor_does(make_harness: MakeHarness) -> None:
    harness = make_harness(1)

    assert harness.serve(ExecuteModel(echo_step(1, needs_masks=True))) == ExitCode.OK
    assert not harness.failures


@pytest.mark.parametrize(
    "calls",
    [
        (ExecuteModel(echo_step(1, needs_masks=True)), ExecuteModel(echo_step(2))),
        (ExecuteModel(echo_step(1, needs_masks=True)), GiveMasks(echo_masks(2, 77))),
        (ExecuteModel(echo_step(1)), GiveMasks(echo_masks(1, 77))),
    ],
    ids=["a step instead", "another step's", "unasked"],
)
def test_masks_that_are_missing_or_do_not_belong_to_the_step_end_the_replica(
    make_harness: MakeHarness, calls: tuple[Call, ...]
) -> None:
    harness = make_harness(1)

    harness.serve(*calls)

    [failure] = harness.failures
    assert "ProtocolError" in failure.error


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_the_next_step_is_launched_before_the_one_ahead_is_done(
    make_harness: MakeHarness, tp_rank: int
) -> None:
    harness = make_harness(tp_rank, worker_class=ComputingDevice)
    harness.serve(*(ExecuteModel(echo_step(step)) for step in range(1, 5)), MEMORY_REPORT)

    assert harness.worker.story == [
        "launch 1", "launch 2", "end 1", "launch 3", "end 2", "launch 4", "end 3", "end 4", "hook",
    ]  # fmt: skip
    assert [call_id for call_id, _ in harness.take_answers()] == ([1, 2, 3, 4, 5] if tp_rank == 0 else [5])


def test_a_step_is_answered_when_it_is_done_though_no_call_comes(make_harness: MakeHarness) -> None:
    harness = make_harness(0, worker_class=ComputingDevice)
    harness.sender.send(FrameKind.REQUEST, 1, ExecuteModel(echo_step(1)))
    serving = threading.Thread(target=harness.loop.run)
    serving.start()

    with harness.answers.receive(deadline_at=time.monotonic() + 20.0) as frame:
        assert (frame.call_id, type(frame.message)) == (1, StepDone)
    harness.sender.close()
    serving.join(20.0)
    assert not serving.is_alive()


def test_a_step_waits_for_its_masks_only_when_the_one_ahead_is_answered(make_harness: MakeHarness) -> None:
    harness = make_harness(0, worker_class=ComputingDevice)
    harness.sender.send(FrameKind.REQUEST, 1, ExecuteModel(echo_step(1)))
    harness.sender.send(FrameKind.REQUEST, 2, ExecuteModel(echo_step(2, needs_masks=True)))
    serving = threading.Thread(target=harness.loop.run)
    serving.start()

    with harness.answers.receive(deadline_at=time.monotonic() + 20.0) as frame:
        assert frame.call_id == 1
    harness.sender.send(FrameKind.REQUEST, 3, GiveMasks(echo_masks(2, 77)))
    with harness.answers.receive(deadline_at=time.monotonic() + 20.0) as frame:
        assert isinstance(frame.message, StepDone)
        assert frame.message.output.sampled_token_ids == [77]
    harness.sender.close()
    serving.join(20.0)
    assert harness.worker.story == ["launch 1", "launch 2", "end 1", "end 2"]


def test_a_failure_of_the_device_is_that_of_the_step_it_computed(make_harness: MakeHarness) -> None:
    harness = make_harness(1, worker_class=ComputingDevice)
    harness.worker.fails_at = 2
    harness.serve(*(ExecuteModel(echo_step(step)) for step in range(1, 5)))

    [failure] = harness.failures
    assert (failure.call_id, failure.phase) == (2, "forward")
    assert failure.error == "ArithmeticError: the device has failed"
    assert harness.worker.story[-1] == "end 2"


def test_a_step_that_fails_is_told_by_any_rank_and_is_the_last(make_harness: MakeHarness) -> None:
    harness = make_harness(1, [Fault(action="raise", rank=1, step=2)])
    harness.serve(ExecuteModel(echo_step(1)), ExecuteModel(echo_step(2)), MEMORY_REPORT)

    assert harness.take_answers() == []
    (failure,) = harness.failures
    assert (failure.tp_rank, failure.call_id, failure.phase) == (1, 2, "forward")
    assert failure.error == "ArithmeticError: rank 1 was told to fail"
    assert "echo_worker.py" in failure.traceback


def test_an_answer_that_cannot_be_encoded_is_a_failure_of_its_call(make_harness: MakeHarness) -> None:
    harness = make_harness(0, [Fault(action="garbage", rank=0, step=1)])
    harness.serve(ExecuteModel(echo_step(1)))

    assert harness.take_answers() == []
    assert "cannot be encoded" in harness.failures[0].error


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (RunHook("divide", encode_argument({"numerator": 1, "denominator": 0})), "ZeroDivisionError"),
        (RunHook("divide", encode_argument("one by two")), "ValidationError"),
        (RunHook("unspeakable", encode_argument(None)), "TypeError"),
        (RunHook("nothing_of_the_kind", encode_argument(None)), "KeyError"),
    ],
    ids=["raises", "wrong argument", "result without a form", "unknown"],
)
def test_a_hook_that_fails_ends_the_call_only(make_harness: MakeHarness, call: RunHook, words: str) -> None:
    harness = make_harness(0)
    harness.serve(call, ExecuteModel(echo_step(1)))

    (_, failure), (_, step) = harness.take_answers()
    assert isinstance(failure, WorkerFailure)
    assert words in failure.error
    assert (failure.phase, failure.call_id) == ("hook", 1)
    assert isinstance(step, StepDone)
    assert harness.failures == []


def test_a_hook_gets_the_worker_and_a_typed_argument(make_harness: MakeHarness) -> None:
    harness = make_harness(1)
    harness.serve(RunHook("divide", encode_argument({"numerator": 3, "denominator": 2})))

    ((_, answer),) = harness.take_answers()
    assert isinstance(answer, HookDone)
    assert msgspec.msgpack.decode(answer.result) == {"tp_rank": 1, "quotient": 1.5}


def test_a_call_out_of_sequence_ends_the_loop(make_harness: MakeHarness) -> None:
    harness = make_harness(0)
    harness.sender.send(FrameKind.REQUEST, 2, MEMORY_REPORT)

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
