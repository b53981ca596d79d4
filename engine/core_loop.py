"""The loop of an engine core's main thread: take what came in, compute one step, hand the outputs over.

Called by: core_proc.py, in the engine-core process. With nothing to do the loop sleeps on its inbox, which front ends,
the signal handler, the parent and the executor's death watch all ring. What it does stands on the status board, and is
written again every other second also at rest: one that stops writing hangs.

When a worker is lost or a thread fails, `run` raises what the inbox says of it. When a front end dies, its requests end
here (`FrontEndGone`). A stop aborts what still runs: draining is up to the front ends, which admit nothing and wait
before.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import Any, assert_never

import msgspec

from ..shm.status_board import Phase, StatusSlot
from .control_calls import carry_out
from .core import EngineCore, OutputsByClient
from .core_control import CoreControl, CoreControlDone, FrontEndGone
from .core_io import (
    ClientLost,
    ClientOutputs,
    CoreInput,
    CoreOutput,
    ExecutorFailed,
    GrammarReady,
    Inbox,
    InboxItem,
    ReplayAsked,
    StopRequested,
    ThreadFailed,
)
from .kv_event_publisher import KVEventPublisher
from .messages import (
    AbortRequests,
    AdmittedMark,
    ClientHello,
    EngineCoreOutputs,
    EngineCoreRequest,
    FollowPrefixes,
    PrefixCacheReset,
    ResetPrefixCache,
)

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.05
"""Between two reports while something changes."""
STATS_INTERVAL_AT_REST_S = 2.0
"""Between two reports while nothing does: a coordinator that was restarted learns of us from the next one."""


class EngineCoreLoop:
    """The main thread's loop. `run` returns after a stop, and raises ProcessError when the replica is lost, and
    RuntimeError when a thread of this process has failed.

    slot:        where it says what it does; None: nowhere
    tell_parent: takes the answers to what the parent asked
    """

    def __init__(
        self,
        core: EngineCore,
        inbox: Inbox,
        input: CoreInput,
        output: CoreOutput,
        publisher: KVEventPublisher | None = None,
        *,
        dp_rank: int,
        epoch: int,
        slot: StatusSlot | None = None,
        tell_parent: Callable[[CoreControlDone], None] = lambda done: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slot = slot
        self._tell_parent = tell_parent
        self._core = core
        self._inbox = inbox
        self._input = input
        self._output = output
        self._publisher = publisher
        self._dp_rank = dp_rank
        self._epoch = epoch
        self._clock = clock
        # By front end: the one that is connected, or the first that may come. What older ones have sent is dropped.
        self._incarnations: dict[int, int] = {}
        # The number of the last request of each front end: told together with the counts that include it.
        self._admitted: dict[int, int] = {}
        self._followers: set[int] = set()
        self._asked: deque[CoreControl] = deque()
        self._is_stopping = False
        self._has_changed = True
        self._reported_at = -STATS_INTERVAL_AT_REST_S

    def run(self) -> None:
        """Serve until a stop is requested; then abort what is left and hand over the last outputs."""
        while not self._is_stopping:
            self._report_stats()
            self._take_inbox()
            if self._core.has_work and not self._is_stopping:
                self._has_changed = True
                self._set_phase(Phase.SCHEDULING)
                self._hand_over(self._core.step(self._take_results, self._begin_wait))
                while self._asked:
                    self._handle(self._asked.popleft())
        self._set_phase(Phase.STOPPING)
        # What has arrived by now gets its answer as well.
        self._input.close()
        self._take_arrived()
        log.info(
            "engine core stops dp_rank=%d unfinished=%d", self._dp_rank, self._core.num_unfinished_requests
        )
        self._hand_over(self._core.abort_all())

    def _take_inbox(self) -> None:
        """Handle all that has come in; wait for it when there is nothing to compute."""
        try:
            if self._core.has_work:
                self._handle(self._inbox.get_nowait())
            else:
                self._set_phase(Phase.PAUSED if self._core.is_held else Phase.IDLE)
                self._handle(self._inbox.get(timeout=max(0.0, self._next_wake_at() - self._clock())))
        except Empty:
            return
        self._take_arrived()

    def _begin_wait(self) -> None:
        self._set_phase(Phase.WAITING)

    def _take_results(self) -> None:
        """What comes in while a step is under way counts before its result; but what the parent asks, after it."""
        self._set_phase(Phase.SCHEDULING)
        self._take_arrived(is_in_step=True)

    def _set_phase(self, phase: Phase) -> None:
        if self._slot is not None:
            self._slot.set(phase, call_id=self._core.num_unfinished_requests, step=self._core.num_steps)

    def _take_arrived(self, *, is_in_step: bool = False) -> None:
        """Handle all that has come in; never waits."""
        try:
            while True:
                item = self._inbox.get_nowait()
                if is_in_step and isinstance(item, CoreControl):
                    # It may have all steps in flight end, which cannot be within one of them.
                    self._asked.append(item)
                else:
                    self._handle(item)
        except Empty:
            return

    def _handle(self, item: InboxItem) -> None:
        self._has_changed = True
        match item:
            case EngineCoreRequest():
                if item.incarnation >= self._incarnations.get(item.client_index, 0):
                    self._core.add_request(item)
                    number = max(item.number, self._admitted.get(item.client_index, 0))
                    self._admitted[item.client_index] = number
            case AbortRequests():
                self._core.abort_requests(item.request_ids)
            case ClientHello():
                self._greet(item)
            case ClientLost():
                self._followers.discard(item.client_index)
                self._core.abort_client(item.client_index)
            case FrontEndGone():
                self._lose(item)
            case StopRequested():
                self._is_stopping = True
            case ExecutorFailed():
                raise item.error
            case ThreadFailed():
                raise RuntimeError(f"thread {item.name} failed: {item.error}") from item.error
            case ResetPrefixCache():
                is_reset = self._core.reset_prefix_cache()
                answer = PrefixCacheReset(call_id=item.call_id, is_reset=is_reset)
                self._answer(item.client_index, reset=answer)
                self._tell_kv_events()
            case FollowPrefixes():
                self._tell_kv_events()
                self._followers.add(item.client_index)
                self._answer(item.client_index, prefix_delta=self._core.follow_prefixes())
            case GrammarReady():
                self._core.take_grammars()
            case CoreControl():
                self._set_phase(Phase.HOOK)
                done, outputs = carry_out(self._core, item)
                self._hand_over(outputs)
                self._tell_parent(done)
            case ReplayAsked():
                self._tell_kv_events()
                if self._publisher is not None:
                    self._publisher.answer(item, self._core.replay_kv_events(item.first_sequence))
            case _:
                assert_never(item)

    def _greet(self, hello: ClientHello) -> None:
        """Connect a front end; an earlier incarnation of it is gone, and so are its requests."""
        known = self._incarnations.get(hello.client_index)
        if known is not None and hello.incarnation < known:
            return
        if known is not None and hello.incarnation > known:
            self._followers.discard(hello.client_index)
            self._admitted.pop(hello.client_index, None)
            num_aborted = self._core.abort_client(hello.client_index)
            log.info("front end restarted client_index=%d aborted=%d", hello.client_index, num_aborted)
        self._incarnations[hello.client_index] = hello.incarnation
        self._output.put(hello)

    def _lose(self, gone: FrontEndGone) -> None:
        """Compute nothing more for a front end that has ended. Its next incarnation may have said hello already."""
        if self._incarnations.get(gone.client_index, 0) <= gone.incarnation:
            # What it has sent, and is still on its way, is for nobody.
            self._incarnations[gone.client_index] = gone.incarnation + 1
            self._followers.discard(gone.client_index)
            self._admitted.pop(gone.client_index, None)
            num_aborted = self._core.abort_client(gone.client_index)
            self._output.put(ClientLost(gone.client_index))
            log.info("front end gone client_index=%d aborted=%d", gone.client_index, num_aborted)

    def _hand_over(self, outputs: OutputsByClient) -> None:
        for client_index, client_outputs in outputs.items():
            self._answer(client_index, outputs=client_outputs)
        self._tell_kv_events()

    def _tell_kv_events(self) -> None:
        """Tell all followers what the prefix cache has won and lost."""
        if batches := self._core.take_kv_events():
            if self._publisher is not None:
                self._publisher.publish(batches)
        if delta := self._core.take_prefix_delta():
            for client_index in self._followers:
                self._answer(client_index, prefix_delta=delta)

    def _answer(self, client_index: int, **fields: Any) -> None:
        message = EngineCoreOutputs(dp_rank=self._dp_rank, epoch=self._epoch, **fields)
        self._output.put(ClientOutputs(client_index=client_index, outputs=message))

    def _next_wake_at(self) -> float:
        """When there is something to do that nobody rings for: a report, or the deadline of a request."""
        deadline_at = self._core.next_deadline_at
        report_at = self._next_report_at()
        return report_at if deadline_at is None else min(report_at, deadline_at)

    def _next_report_at(self) -> float:
        return self._reported_at + (STATS_INTERVAL_S if self._has_changed else STATS_INTERVAL_AT_REST_S)

    def _report_stats(self) -> None:
        now = self._clock()
        if now >= self._next_report_at():
            self._reported_at = now
            self._has_changed = False
            admitted = [
                AdmittedMark(
                    client_index=client_index, incarnation=incarnation, number=self._admitted[client_index]
                )
                for client_index, incarnation in self._incarnations.items()
                if client_index in self._admitted
            ]
            self._output.put(msgspec.structs.replace(self._core.stats(), admitted=admitted))
