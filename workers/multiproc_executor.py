"""MultiprocExecutor: one process per rank; calls go out over one ring, answers come back over a ring per rank.

Called by: the engine core (and `LLM`), one thread. Imports no torch. worker_group.py has the processes and the
memory, reply_ledger.py the matching of answers; this file has the calls and what happens when one fails.
Invariants: every wait has a deadline; after the first failure nothing is sent any more.

When a worker dies, or a step fails on any rank: whoever waits is woken at once, all workers are killed (nobody
waits for a collective that will not come), and the caller gets the ProcessError that names the first cause. While
nobody waits, `on_failure` tells of it. A wait that takes long is reported in the log, with the stack of the rank
that is behind. When this process dies: the workers are killed by the kernel.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from ..shm.codec import FrameKind
from ..shm.errors import (
    CallCancelledError,
    ConfigError,
    ProcessError,
    ProcessHungError,
    ProtocolError,
    QueueClosedError,
    QueueEmptyError,
    QueueTimeoutError,
    StartupError,
)
from ..shm.ring_buffer import MAX_READERS
from ..shm.stall import StallDetector
from ..shm.status_board import Phase, RankStatus, StatusBoard
from .calls import (
    Call,
    ExecuteModel,
    GiveMasks,
    InitializeKVCache,
    KVCacheInitialized,
    Reply,
    RunHook,
    StepDone,
    WorkerFailure,
)
from .config import ExecutorConfig
from .hooks import HookOutcome, check_hook_name, encode_argument, hook_outcome
from .messages import ExecutorReport, GrammarMasks, ModelRunnerOutput, PhaseTime, RankReport, SchedulerOutput
from .reply_ledger import PendingCall, ReplyLedger
from .stall import describe_stall
from .transformer_config import read_transformer_config
from .worker_config import WorkerConfig
from .worker_group import WorkerGroup, start_workers
from .worker_loop import OUTPUT_RANK

DEFAULT_WORKER_CLASS = "phalanx.workers.worker:Worker"

log = logging.getLogger(__name__)

T = TypeVar("T")


class MultiprocStep:
    """A step under way. Same thread as the executor."""

    def __init__(self, executor: "MultiprocExecutor", call: PendingCall) -> None:
        self._executor = executor
        self._call = call

    @property
    def is_done(self) -> bool:
        """True when `result` returns at once. Takes in what has come; never blocks. Raises ProcessError."""
        return self._executor.is_answered(self._call)

    def result(self, timeout_s: float | None = None) -> ModelRunnerOutput:
        """Wait for the outcome; again returns the same.

        timeout_s: for this wait. QueueTimeoutError when it passes: the step goes on, and may be asked for again
        Raises ProcessError, and the executor has closed itself then; CallCancelledError after `cancel`.
        """
        reply = self._executor.wait_call(self._call, timeout_s)[OUTPUT_RANK]
        assert isinstance(reply, StepDone)
        return reply.output

    def cancel(self) -> None:
        """Give up the outcome, not the step: all ranks compute it. No effect on one that is done."""
        self._executor.cancel(self._call)


class MultiprocExecutor:
    """See executor.Executor.

    worker_configs: one per rank, in the order of tp_rank; their `rendezvous` is filled in here
    role_prefix:    of the workers' names ("dp0" gives "dp0 tp1")
    epoch:          counts the lives of the replica
    worker_class:   "module:class" that takes (WorkerConfig, on_phase)
    board:          where the ranks say what they do, from slot `first_slot` on; None: a board of its own
    on_phase:       called with (tp_rank, phase) while the ranks start, from the thread that calls `start()`
    on_failure:     called once, from a thread of the executor, when a rank dies or a step fails on one, whether
                    anybody waits or not; must not block, nor call back
    """

    def __init__(
        self,
        worker_configs: Sequence[WorkerConfig],
        *,
        config: ExecutorConfig,
        role_prefix: str = "dp0",
        epoch: int = 0,
        worker_class: str = DEFAULT_WORKER_CLASS,
        board: StatusBoard | None = None,
        first_slot: int = 0,
        on_phase: Callable[[int, str], None] | None = None,
        on_failure: Callable[[ProcessError], None] | None = None,
    ) -> None:
        if not 1 <= len(worker_configs) <= MAX_READERS:
            raise ConfigError(
                "parallel.tensor_parallel_size", f"must be 1 to {MAX_READERS}, not {len(worker_configs)}"
            )
        self._worker_configs = list(worker_configs)
        self._config = config
        self._role_prefix = role_prefix
        self._epoch = epoch
        self._worker_class = worker_class
        self._board = board
        self._first_slot = first_slot
        self._on_phase = on_phase
        self._on_failure = on_failure
        self._ranks = frozenset(range(len(worker_configs)))
        self._ledger = ReplyLedger(epoch)
        self._group: WorkerGroup | None = None
        self._failure: ProcessError | None = None
        self._close_reason: str | None = None
        self._last_call_id = 0
        self._answered_at = 0.0
        self._stall = StallDetector(config.stall_report_s, 0.0)

    @property
    def failure(self) -> ProcessError | None:
        """The first failure; None while all is well. Any thread."""
        group = self._group
        return self._failure or (group.watch.failure if group is not None else None)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, by tp_rank; empty unless they run."""
        return [] if self._group is None else [child.pid for child in self._group.children]

    @property
    def num_dropped_replies(self) -> int:
        """Answers that came for nobody: of calls that were given up, or of another epoch."""
        return self._ledger.num_dropped

    @property
    def phases(self) -> list[RankStatus]:
        """What each rank is doing, by tp_rank; empty unless they run."""
        group = self._group
        return (
            []
            if group is None
            else [group.board.read(group.first_slot + rank) for rank in sorted(self._ranks)]
        )

    def start(self) -> ExecutorReport:
        """Start all ranks, load the model, make the KV cache of the size that all ranks can hold.

        Blocks at most `start_timeout_s`. Raises StartupError, ConfigError or TransportError; nothing is left then.
        """
        if self._group is not None or self._close_reason is not None:
            raise QueueClosedError(f"the executor is closed or running: {self._close_reason}")
        deadline_at = time.monotonic() + self._config.start_timeout_s
        model = read_transformer_config(self._worker_configs[0].model.path)
        self._group, reports = start_workers(
            self._worker_configs,
            config=self._config,
            role_prefix=self._role_prefix,
            epoch=self._epoch,
            worker_class=self._worker_class,
            board=self._board,
            first_slot=self._first_slot,
            deadline_at=deadline_at,
            on_phase=self._on_phase,
            on_failure=self._on_failure,
        )
        max_model_len = self._worker_configs[0].model.max_model_len or model.max_position_embeddings
        cache = self._worker_configs[0].cache
        num_blocks = cache.num_blocks or min(report.num_kv_blocks for report in reports)
        try:
            reports = self._initialize_kv_cache(reports, num_blocks, deadline_at)
        except ProcessError as error:
            detail = error.detail or str(error)
            raise StartupError(error.role, rank=error.rank, exitcode=error.exitcode, detail=detail) from error
        except BaseException:
            self._close("the start was broken off", grace_s=0.0)
            raise
        return ExecutorReport(
            num_kv_blocks=num_blocks,
            block_size=cache.block_size,
            max_model_len=min(max_model_len, model.max_position_embeddings),
            vocab_size=model.vocab_size,
            ranks=reports,
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step that needs no masks. As `submit_model(...).result()`."""
        return self.submit_model(scheduler_output).result()

    def submit_model(self, scheduler_output: SchedulerOutput) -> MultiprocStep:
        """Send one step to all ranks, and return before it is computed. Several may be under way.

        Blocks only while the ring is full, at most `step_timeout_s`. Raises ProcessError (closed itself then);
        MessageTooLargeError, and nothing was sent.
        """
        budget_s = self._config.step_timeout_s
        deadline_at = time.monotonic() + budget_s
        return MultiprocStep(
            self, self._call(ExecuteModel(scheduler_output), {OUTPUT_RANK}, deadline_at, budget_s=budget_s)
        )

    def submit_masks(self, masks: GrammarMasks) -> None:
        """Send the masks that the step sent last waits for. Blocks and raises as `submit_model`."""
        self._call(GiveMasks(masks), set(), time.monotonic() + self._config.step_timeout_s)

    def collective_rpc(
        self,
        name: str,
        argument: object = None,
        *,
        result_type: type[T] | None = None,
        timeout_s: float | None = None,
    ) -> list[HookOutcome[T]]:
        """Run a hook on all ranks, behind the steps under way; return what came of it, by tp_rank.

        result_type: what each result is decoded to; None: plain lists, dicts, numbers and text
        timeout_s:   None: `call_timeout_s`. Ranks without an answer by then have that as their error; it does not end
                     the replica, though a rank that hangs in a hook will not come to its next step
        Raises ValueError for an unknown name, TypeError for an argument that msgpack cannot carry; else as
        `submit_model`.
        """
        check_hook_name(name, self._config.hooks)
        call = RunHook(name, encode_argument(argument))
        timeout_s = self._config.call_timeout_s if timeout_s is None else timeout_s
        # A ring that stays full is a hung rank, and no matter of how patient this caller is.
        deadline_at = time.monotonic() + max(timeout_s, self._config.step_timeout_s)
        pending = self._call(call, set(self._ranks), deadline_at, budget_s=math.inf)
        try:
            self.wait_call(pending, timeout_s)
        except QueueTimeoutError:
            self.cancel(pending)
        return [
            hook_outcome(rank, pending.answers.get(rank), timeout_s, result_type)
            for rank in sorted(self._ranks)
        ]

    def check(self) -> None:
        """Take in what has come; never blocks. Raises the ProcessError that has ended the replica, if one has."""
        self._take_replies(self._live())

    def is_answered(self, call: PendingCall) -> bool:
        """Take in what has come; True when `call` needs no more. For steps under way."""
        if not call.is_done:
            self.check()
        return call.is_done

    def wait_call(
        self, call: PendingCall, timeout_s: float | None = None
    ) -> Mapping[int, Reply | WorkerFailure]:
        """Wait for the answers to `call`, by tp_rank. For steps under way; as `MultiprocStep.result`."""
        until_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_answered(call):
            group = self._live()
            now = time.monotonic()
            deadline_at = max(call.deadline_at, self._answered_at + call.budget_s)
            if now >= deadline_at:
                raise self._hung(group, call.awaited, call.call_id)
            if now >= until_at:
                ranks = ", ".join(self._role(rank) for rank in sorted(call.awaited))
                raise QueueTimeoutError(f"call {call.call_id} has no answer from {ranks} after {timeout_s} s")
            if self._stall.is_due(now):
                self._report_stall(group, call.awaited, call.call_id)
            group.wait_bell(min(deadline_at, until_at, self._stall.next_report_at) - now)
        if call.is_cancelled:
            raise CallCancelledError(f"call {call.call_id} was given up")
        return call.answers

    def cancel(self, call: PendingCall) -> None:
        """Give up the answers to `call`: they are dropped when they come. For steps under way."""
        self._ledger.cancel(call)

    def close(self, *, reason: str) -> None:
        """End all ranks and free everything.

        Bounded by `stop_timeout_s` (workers leave by themselves) or, after a failure, by the time of a kill.
        Idempotent. Calls afterwards raise QueueClosedError, or the failure.
        """
        self._close(reason, grace_s=0.0 if self.failure is not None else self._config.stop_timeout_s)

    def _close(self, reason: str, *, grace_s: float) -> None:
        if self._close_reason is None:
            self._close_reason = reason
        group, self._group = self._group, None
        if group is not None:
            self._failure = self._failure or group.watch.failure
            log.info("executor %s closes: %s", self._role_prefix, reason)
            group.close(grace_s=grace_s)

    def _initialize_kv_cache(
        self, reports: Sequence[RankReport], num_blocks: int, deadline_at: float
    ) -> list[RankReport]:
        """Make the KV cache on all ranks; return their reports with the time it took."""
        replies = self.wait_call(self._call(InitializeKVCache(num_blocks), set(self._ranks), deadline_at))
        complete = []
        for rank, report in enumerate(reports):
            reply = replies[rank]
            assert isinstance(reply, KVCacheInitialized)
            phases = [*report.phases, PhaseTime(Phase.KV_CACHE.value, reply.duration_s)]
            complete.append(msgspec.structs.replace(report, phases=phases))
        return complete

    def _call(self, call: Call, ranks: set[int], deadline_at: float, *, budget_s: float = 0.0) -> PendingCall:
        """Send `call` to all ranks, and await the answers of `ranks`. budget_s: as in PendingCall."""
        group = self._live()
        if group.watch.failure is not None:
            raise self._fail(group.watch.failure)
        call_id = self._last_call_id + 1
        if not self._ledger.num_pending:
            self._stall.restart(time.monotonic())
        while True:
            try:
                until_at = min(deadline_at, self._stall.next_report_at)
                group.sender.send(FrameKind.REQUEST, call_id, call, deadline_at=until_at)
                break
            except QueueTimeoutError:
                self._take_replies(group)
                now = time.monotonic()
                slowest = {group.sender.ring.slowest_reader()}
                if now >= deadline_at:
                    raise self._hung(group, slowest, call_id) from None
                if self._stall.is_due(now):
                    self._report_stall(group, slowest, call_id)
            except QueueClosedError as error:
                # A worker closes its end only when it leaves, so its death is at hand.
                failure = group.watch.wait_failure(1.0)
                raise self._fail(failure or ProcessError(self._role_prefix, detail=str(error))) from None
        # Counted only now: a call that was not sent must not leave a gap in the sequence.
        self._last_call_id = call_id
        return self._ledger.expect(call_id, ranks, deadline_at, budget_s=budget_s)

    def _live(self) -> WorkerGroup:
        if self._failure is not None:
            raise self._failure
        if self._group is None:
            raise QueueClosedError(f"the executor is closed: {self._close_reason or 'it was never started'}")
        return self._group

    def _take_replies(self, group: WorkerGroup) -> None:
        """Take in all answers that have come. Raises what ends the replica."""
        # Read before the rings: what a dead rank answered last is then surely seen below.
        failure = group.watch.failure
        has_moved = False
        for rank, receiver in enumerate(group.receivers):
            try:
                # Only while one is due: a look into an empty ring costs more than an answer.
                while self._ledger.owes(rank):
                    frame = receiver.take()
                    self._ledger.accept(frame, frame.message)
                    has_moved = True
            except (QueueEmptyError, QueueClosedError):
                continue
            except ProtocolError as error:
                raise self._fail(ProcessError(self._role(rank), rank=rank, detail=str(error))) from error
        if has_moved:
            self._answered_at = time.monotonic()
            self._stall.restart(self._answered_at)
        if failure is not None:
            raise self._fail(failure)

    def _fail(self, failure: ProcessError) -> ProcessError:
        """Remember the failure, kill all workers, return the failure to raise."""
        self._failure = failure
        self._close(str(failure), grace_s=0.0)
        return failure

    def _hung(self, group: WorkerGroup, awaited: set[int], call_id: int) -> ProcessError:
        """Report the rank that is behind, and end the replica for it."""
        culprit, sentence = self._report_stall(group, awaited, call_id)
        return self._fail(ProcessHungError(self._role(culprit), rank=culprit, detail=sentence))

    def _report_stall(self, group: WorkerGroup, awaited: set[int], call_id: int) -> tuple[int, str]:
        """Log who holds up a call. Returns the rank, and what all do."""
        stall = describe_stall(group.children, self.phases, awaited, call_id)
        log.warning("%s\n%s", stall.sentence, stall.stacks)
        return stall.culprit, stall.sentence

    def _role(self, tp_rank: int) -> str:
        return f"{self._role_prefix} tp{tp_rank}"
