"""WorkerLoop: serves the executor's calls on one rank, one after the other, until it is told to leave.

Called by: worker_proc.py, in the main thread of the worker process, which alone writes the rank's slot of the
status board. Waiting for a call sleeps in the kernel.

A step is launched when its call comes, and answered when the device is done with it: the next one can be launched
meanwhile. While a step is computed, the loop looks by turns for the next call and for the end of the step, without
sleeping: who waits for the answer waits for the device. On CPU a step is computed when it is launched.
Invariants: steps are answered in their order, and everything else happens between two steps: hooks, and the wait for
grammar masks, which depend on the tokens of the step before. A call that must not come now ends the loop by an error:
to go on would be to run out of step with the peers.

When the parent dies: the process is killed (shm/child.py). When a peer rank dies: the executor kills this one.
"""

import math
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Protocol, assert_never

from ..shm.channel import CallSequence, Receiver, Sender
from ..shm.codec import FrameKind
from ..shm.errors import ProtocolError, QueueClosedError, QueueEmptyError
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
from .messages import GrammarMasks, PhaseTime, RankReport, SchedulerOutput
from .step_in_flight import StepInFlight

OUTPUT_RANK = 0
"""The tp_rank that answers a step."""
MAX_LAUNCHED = 2
"""Steps on the device at once: one that it computes, and one that it finds when it is done."""

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

    def begin_step(
        self, scheduler_output: SchedulerOutput, receive_masks: Callable[[], GrammarMasks]
    ) -> StepInFlight:
        """Launch one step, together with the other ranks; its outcome is waited for later, in the order of steps.

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
        self._launched: deque[tuple[int, StepInFlight]] = deque()

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
                self._calls.take(deadline_at=math.inf)
        except QueueClosedError:
            self._clock.set(Phase.STOPPING)
            return ExitCode.OK

    def _serve_next(self) -> bool:
        """Answer the steps that are done, and serve a call if one is there; waits for one when nothing is computed.

        False when something failed and the replica must end.
        """
        if self._launched and not self._guard(self._launched[0][0], self._answer_computed):
            return False
        if not self._launched:
            self._clock.set(Phase.IDLE)
        try:
            frame = self._calls.take(deadline_at=None if self._launched else math.inf)
        except QueueEmptyError:
            return True
        self._sequence.accept(frame)
        call_id, call = frame.call_id, frame.message
        is_step = isinstance(call, ExecuteModel)
        if self._launched and not is_step and not self._guard(self._launched[0][0], self._answer_all):
            return False
        step = call.scheduler_output.step if isinstance(call, ExecuteModel) else None
        self._clock.set(Phase.READING, call_id=call_id, step=step)
        return self._guard(call_id, lambda: self._run(call_id, call), is_hook=isinstance(call, RunHook))

    def _guard(self, call_id: int, run: Callable[[], None], *, is_hook: bool = False) -> bool:
        """The border of a call: whatever goes wrong is told, by any rank, at once. False when the replica must end."""
        try:
            run()
        except Exception as error:
            if isinstance(error, QueueClosedError) and self._clock.phase is Phase.MASKS:
                # The executor leaves, and owes nobody the masks of a step that it gives up.
                raise
            failure = WorkerFailure(
                tp_rank=self._worker.tp_rank,
                call_id=call_id,
                phase=self._clock.phase,
                error=f"{type(error).__name__}: {error}"[:_MAX_TEXT],
                traceback=traceback.format_exc()[-_MAX_TEXT:],
                failed_at=time.monotonic(),
            )
            if not is_hook:
                self._tell_failure(failure)
                return False
            self._send(FrameKind.ERROR, call_id, failure)
        return True

    def _run(self, call_id: int, call: Call) -> None:
        match call:
            case ExecuteModel():
                step = call.scheduler_output.step
                launched = self._worker.begin_step(call.scheduler_output, lambda: self._receive_masks(step))
                self._launched.append((call_id, launched))
                # One that is computed already fails as its own call, and not as the next.
                if len(self._launched) == 1 and launched.is_done:
                    self._answer_oldest()
            case GiveMasks():
                raise ProtocolError(f"masks came for step {call.masks.step}, and no step waits for them")
            case InitializeKVCache():
                self._clock.set(Phase.KV_CACHE)
                began_at = time.monotonic()
                self._worker.initialize_kv_cache(call.num_blocks)
                self._answer(call_id, KVCacheInitialized(time.monotonic() - began_at))
            case RunHook():
                self._clock.set(Phase.HOOK)
                self._answer(call_id, HookDone(self._hooks.run(self._worker, call.name, call.argument)))
            case _:
                assert_never(call)

    def _answer_computed(self) -> None:
        """Answer the oldest step if it is done, or wait for it when no further one may be launched before."""
        if len(self._launched) == MAX_LAUNCHED or self._launched[0][1].is_done:
            self._answer_oldest()

    def _answer_all(self) -> None:
        """Wait for all steps on the device, and answer them."""
        while self._launched:
            self._answer_oldest()

    def _answer_oldest(self) -> None:
        # Every rank waits for every step: what is on the host is the same on all of them then.
        call_id, launched = self._launched.popleft()
        output = launched.wait()
        if self._answers_steps:
            self._answer(call_id, StepDone(output))
        if self._launched:
            self._clock.set(Phase.FORWARD)

    def _answer(self, call_id: int, reply: Reply) -> None:
        self._clock.set(Phase.REPLYING)
        self._send(FrameKind.REPLY, call_id, reply)

    def _receive_masks(self, step: int) -> GrammarMasks:
        """Wait for the masks of the step under way. The engine core sends them, or closes the ring, or is gone."""
        # It makes them of the tokens of the step before.
        self._answer_all()
        self._clock.set(Phase.MASKS)
        frame = self._calls.take(deadline_at=math.inf)
        self._sequence.accept(frame)
        call = frame.message
        if not isinstance(call, GiveMasks) or call.masks.step != step:
            raise ProtocolError(f"call {frame.call_id} came when the masks of step {step} were due")
        return call.masks

    def _send(self, kind: FrameKind, call_id: int, message: Reply | WorkerFailure) -> None:
        self._replies.send(kind, call_id, message, deadline_at=time.monotonic() + _REPLY_TIMEOUT_S)
