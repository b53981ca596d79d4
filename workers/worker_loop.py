"""WorkerLoop: serves the executor's calls on one rank, one after the other, until it is told to leave.

Called by: worker_proc.py, in the main thread of the worker process, which alone writes the rank's slot of the
status board. Waiting for a call sleeps in the kernel.
Invariant: a call that must not come now ends the loop by an error: to go on would be to run out of step with the
peers.

When the parent dies: the process is killed (shm/child.py). When a peer rank dies: the executor kills this one.
"""

import math
import time
import traceback
from collections.abc import Callable
from typing import Protocol, assert_never

from ..shm.channel import CallSequence, Receiver, Sender
from ..shm.codec import FrameKind
from ..shm.errors import ProtocolError, QueueClosedError
from ..shm.exit_codes import ExitCode
from ..shm.status_board import Phase, StatusSlot
from .calls import (
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
from .hooks import HookRegistry
from .memory_report import ModelMemory
from .messages import GrammarMasks, ModelRunnerOutput, PhaseTime, RankReport, SchedulerOutput

OUTPUT_RANK = 0
"""The tp_rank that answers a step."""

_REPLY_TIMEOUT_S = 60.0
"""For room in the ring of replies. It holds thousands of them, so the engine core is hung if it is full."""
_MAX_TEXT = 32 << 10


class WorkerLike(Protocol):
    """What a worker class must offer: `workers.worker.Worker`, or an echo in tests."""

    @property
    def tp_rank(self) -> int:
        """Which rank it is."""
        ...

    def start(self) -> RankReport:
        """Load the model; call `on_phase` as each phase begins."""
        ...

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Make the KV cache."""
        ...

    def execute_model(
        self, scheduler_output: SchedulerOutput, receive_masks: Callable[[], GrammarMasks]
    ) -> ModelRunnerOutput:
        """Compute one step, together with the other ranks.

        receive_masks: to be called once, before the step samples, exactly when it `needs_masks`; blocks
        """
        ...

    def model_memory(self) -> ModelMemory:
        """Say what it holds of the model."""
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
    """Serves calls. One thread.

    tell_failure: tells the parent of a call that failed here and that ends the replica; never blocks for long
    """

    def __init__(
        self,
        worker: WorkerLike,
        *,
        calls: Receiver[Call],
        replies: Sender,
        sequence: CallSequence,
        clock: PhaseClock,
        hooks: HookRegistry,
        tell_failure: Callable[[WorkerFailure], None],
    ) -> None:
        self._worker = worker
        self._calls = calls
        self._replies = replies
        self._sequence = sequence
        self._clock = clock
        self._hooks = hooks
        self._tell_failure = tell_failure
        self._answers_steps = worker.tp_rank == OUTPUT_RANK

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
        # The border of a call: whatever goes wrong is told, by any rank, at once.
        try:
            reply = self._run(call)
            if self._answers_steps or not isinstance(call, ExecuteModel):
                self._clock.set(Phase.REPLYING)
                self._send(FrameKind.REPLY, header.call_id, reply)
        except Exception as error:
            if isinstance(error, QueueClosedError) and self._clock.phase is Phase.MASKS:
                # The executor leaves, and owes nobody the masks of a step that it gives up.
                raise
            failure = WorkerFailure(
                tp_rank=self._worker.tp_rank,
                call_id=header.call_id,
                phase=self._clock.phase,
                error=f"{type(error).__name__}: {error}"[:_MAX_TEXT],
                traceback=traceback.format_exc()[-_MAX_TEXT:],
                failed_at=time.monotonic(),
            )
            if not isinstance(call, RunHook):
                self._tell_failure(failure)
                return False
            self._send(FrameKind.ERROR, header.call_id, failure)
        return True

    def _run(self, call: Call) -> Reply:
        match call:
            case ExecuteModel():
                step = call.scheduler_output.step
                return StepDone(
                    self._worker.execute_model(call.scheduler_output, lambda: self._receive_masks(step))
                )
            case GiveMasks():
                raise ProtocolError(f"masks came for step {call.masks.step}, and no step waits for them")
            case InitializeKVCache():
                self._clock.set(Phase.KV_CACHE)
                began_at = time.monotonic()
                self._worker.initialize_kv_cache(call.num_blocks)
                return KVCacheInitialized(time.monotonic() - began_at)
            case RunHook():
                self._clock.set(Phase.HOOK)
                return HookDone(self._hooks.run(self._worker, call.name, call.argument))
            case _:
                assert_never(call)

    def _receive_masks(self, step: int) -> GrammarMasks:
        """Wait for the masks of the step under way. The engine core sends them, or closes the ring, or is gone."""
        self._clock.set(Phase.MASKS)
        with self._calls.receive(deadline_at=math.inf) as frame:
            header, call = frame.header, frame.message
        self._sequence.accept(header)
        if not isinstance(call, GiveMasks) or call.masks.step != step:
            raise ProtocolError(f"call {header.call_id} came when the masks of step {step} were due")
        return call.masks

    def _send(self, kind: FrameKind, call_id: int, message: Reply | WorkerFailure) -> None:
        self._replies.send(kind, call_id, message, deadline_at=time.monotonic() + _REPLY_TIMEOUT_S)
