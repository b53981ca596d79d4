"""The worker process: one rank. Starts the worker, then serves calls until told to leave.

Called by: shm/child.py, as the target of a process that MultiprocExecutor started. Torch comes in with the worker
class, imported by name, after the parent has set the environment that torch reads at import.
Invariants: calls are served one at a time, in order, by the main thread, which alone writes the rank's slot of
the status board. Waiting for a call sleeps in the kernel. A call that must not come now ends the process
(ExitCode.PROTOCOL): to go on would be to run out of step with the peers.

When the parent dies: the process is killed (shm/child.py). When a peer rank dies: the executor kills this one.
"""

import importlib
import math
import resource
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, assert_never

import msgspec

from ..shm.channel import CallSequence, Receiver, Sender
from ..shm.child_context import ChildContext
from ..shm.codec import FrameKind
from ..shm.errors import ProtocolError, QueueClosedError
from ..shm.exit_codes import ExitCode
from ..shm.ring_buffer import RingReader, RingWriter
from ..shm.segment import SharedSegment
from ..shm.status_board import Phase, StatusBoard, StatusSlot
from .calls import (
    Call,
    ExecuteModel,
    InitializeKVCache,
    KVCacheInitialized,
    MemoryReport,
    RankMemory,
    Reply,
    StepDone,
    WorkerArgs,
    WorkerFailure,
)
from .messages import ModelRunnerOutput, PhaseTime, RankReport, SchedulerOutput
from .worker_config import WorkerConfig

OUTPUT_RANK = 0
"""The tp_rank that answers a step."""

_REPLY_TIMEOUT_S = 60.0
"""For room in the ring of replies. It holds thousands of them, so the engine core is hung if it is full."""
_MAX_TEXT = 32 << 10
_PAGE_BYTES = resource.getpagesize()


class WorkerLike(Protocol):
    """What a worker class must offer: `workers.worker.Worker`, or an echo in tests."""

    def start(self) -> RankReport:
        """Load the model; call `on_phase` as each phase begins."""
        ...

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Make the KV cache."""
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step, together with the other ranks."""
        ...

    def close(self) -> None:
        """Free the device."""
        ...


class PhaseClock:
    """Tells the status board, and the parent while the rank starts, which phase begins; keeps their durations."""

    def __init__(self, slot: StatusSlot, progress: Callable[[str], None]) -> None:
        self.phase = Phase.NOT_STARTED
        self._slot = slot
        self._progress: Callable[[str], None] | None = progress
        self._begun: list[tuple[str, float]] = []

    def begin(self, name: str) -> None:
        """A phase begins, and the one before it is over."""
        self.set(Phase.named(name))
        if self._progress is not None:
            self._begun.append((name, time.monotonic()))
            self._progress(name)

    def set(self, phase: Phase, *, call_id: int | None = None, step: int | None = None) -> None:
        """As `begin`, on the status board only."""
        self.phase = phase
        self._slot.set(phase, call_id=call_id, step=step)

    def end_start(self) -> list[PhaseTime]:
        """The start is over; return how long its phases took."""
        self._progress = None
        ends = [begun_at for _, begun_at in self._begun[1:]] + [time.monotonic()]
        return [
            PhaseTime(name, end - begun_at) for (name, begun_at), end in zip(self._begun, ends, strict=True)
        ]


class WorkerLoop:
    """Serves calls one after the other. Main thread of the worker process."""

    def __init__(
        self,
        worker: WorkerLike,
        tp_rank: int,
        *,
        calls: Receiver[Call],
        replies: Sender,
        sequence: CallSequence,
        clock: PhaseClock,
        read_memory: Callable[[int], RankMemory],
    ) -> None:
        self._worker = worker
        self._tp_rank = tp_rank
        self._calls = calls
        self._replies = replies
        self._sequence = sequence
        self._clock = clock
        self._read_memory = read_memory

    def run(self) -> ExitCode:
        """Serve until the executor closes the ring, or a stop is asked.

        Raises ProtocolError for a call that must not come.
        """
        try:
            while self._serve_next():
                pass
            # The rank's KV cache can't be trusted, so it runs nothing more. It reads on, until it is ended, and
            # keeps its connections: peers that lost them would report errors of their own.
            while True:
                with self._calls.receive(deadline_at=math.inf):
                    pass
        except QueueClosedError:
            self._clock.set(Phase.STOPPING)
            return ExitCode.OK

    def _serve_next(self) -> bool:
        """Serve one call; False when it failed and the replica must end."""
        self._clock.set(Phase.IDLE)
        with self._calls.receive(deadline_at=math.inf) as frame:
            header, call = frame.header, frame.message
        self._sequence.accept(header)
        step = call.scheduler_output.step if isinstance(call, ExecuteModel) else None
        self._clock.set(Phase.READING, call_id=header.call_id, step=step)
        # The border of a call: whatever goes wrong is answered, by any rank, at once.
        try:
            reply = self._run(call)
            self._clock.set(Phase.REPLYING)
            if self._tp_rank == OUTPUT_RANK or not isinstance(call, ExecuteModel):
                self._send(FrameKind.REPLY, header.call_id, reply)
        except Exception as error:
            failure = WorkerFailure(
                tp_rank=self._tp_rank,
                phase=self._clock.phase,
                error=f"{type(error).__name__}: {error}"[:_MAX_TEXT],
                traceback=traceback.format_exc()[-_MAX_TEXT:],
                failed_at=time.monotonic(),
                is_fatal=not isinstance(call, MemoryReport),
            )
            self._send(FrameKind.ERROR, header.call_id, failure)
            return not failure.is_fatal
        return True

    def _run(self, call: Call) -> Reply:
        match call:
            case ExecuteModel():
                return StepDone(self._worker.execute_model(call.scheduler_output))
            case InitializeKVCache():
                self._clock.set(Phase.KV_CACHE)
                began_at = time.monotonic()
                self._worker.initialize_kv_cache(call.num_blocks)
                return KVCacheInitialized(time.monotonic() - began_at)
            case MemoryReport():
                return self._read_memory(self._tp_rank)
            case _:
                assert_never(call)

    def _send(self, kind: FrameKind, call_id: int, message: Reply | WorkerFailure) -> None:
        self._replies.send(kind, call_id, message, deadline_at=time.monotonic() + _REPLY_TIMEOUT_S)


def main(context: ChildContext) -> int:
    """Run one rank. Returns the exit code of the process."""
    args = msgspec.msgpack.decode(context.args, type=WorkerArgs)
    tp_rank = args.config.tp_rank
    board = StatusBoard.attach(args.board_fd, args.num_slots)
    clock = PhaseClock(board.writer(args.slot), context.progress)
    clock.begin(Phase.IMPORT)
    worker = _load_class(args.worker_class)(args.config, clock.begin)
    report = worker.start()
    request_ring = RingReader(
        SharedSegment.attach(args.request_fd, args.request_bytes),
        tp_rank,
        is_peer_alive=_until(context.stop_requested),
    )
    reply_ring = RingWriter(
        SharedSegment.attach(args.reply_fd, args.reply_bytes),
        is_peer_alive=_until(context.stop_requested),
        doorbell_fd=args.doorbell_fd,
    )
    loop = WorkerLoop(
        worker,
        tp_rank,
        calls=Receiver[Call](request_ring, {FrameKind.REQUEST: Call}),
        replies=Sender(reply_ring, epoch=args.epoch, rank=tp_rank),
        sequence=CallSequence(args.epoch),
        clock=clock,
        read_memory=read_rank_memory,
    )
    context.ready(msgspec.msgpack.encode(msgspec.structs.replace(report, phases=clock.end_start())))
    try:
        return loop.run()
    except ProtocolError as error:
        context.failed(f"protocol: {error}", traceback.format_exc())
        return ExitCode.PROTOCOL
    finally:
        worker.close()


def read_rank_memory(tp_rank: int) -> RankMemory:
    """Return how much memory this process uses."""
    resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return RankMemory(
        tp_rank=tp_rank,
        resident_bytes=resident_pages * _PAGE_BYTES,
        peak_resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _until(stop_requested: threading.Event) -> Callable[[], bool]:
    """Return a check that turns False when a stop is asked: to who waits, that is as good as a closed ring."""
    return lambda: not stop_requested.is_set()


def _load_class(name: str) -> Callable[[WorkerConfig, Callable[[str], None]], WorkerLike]:
    module, _, attribute = name.partition(":")
    loaded: Callable[[WorkerConfig, Callable[[str], None]], WorkerLike] = getattr(
        importlib.import_module(module), attribute
    )
    return loaded
