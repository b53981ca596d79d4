"""EngineCore: one replica's loop body: schedule, execute, update, with up to two steps in flight.

Called by: core_loop.py in the engine-core process, and `InprocCoreClient` for `LLM`; one thread.

    step()   schedule and submit N+1 | wait for N | what has come meanwhile | update with N | masks for N+1
    workers     ... compute N .............| forward of N+1 ...............................| sample N+1

Invariants: steps come back in the order of their submission. The grammar masks of a step go out as soon as it is the
oldest in flight, for they depend on the tokens of the step before; so they are the next message after their step.
Every request that was added ends in exactly one output with a finish reason, or was aborted by its client. When a
worker dies, `step` raises the executor's ProcessError; the replica is over then.
"""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from ..shm.errors import ProcessError
from ..workers.executor import Executor, PendingStep
from ..workers.hooks import HookOutcome
from ..workers.messages import ExecutorReport, SchedulerOutput
from .config import EngineConfig
from .grammar.backend import GrammarCompiler
from .grammar.compiler_pool import Compiled, CompilerPool
from .grammar.llguidance_backend import LLGuidanceCompiler
from .kv_cache_manager import KVCacheManager
from .kv_events import KVEventBatch, KVEventLog
from .messages import EngineCoreOutput, EngineCoreRequest, EngineStats, FinishReason, StepOutputs
from .prefix_log import PrefixDelta, PrefixLog
from .scheduler import Scheduler
from .tokenizer import load_tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")

NUM_KEPT_KV_BATCHES = 1000
"""For followers that have missed some: the batches of about the last half minute of decoding."""

OutputsByClient = dict[int, StepOutputs]
"""What one step made, by client_index."""


class EngineCore:
    """Scheduler and executor of one replica.

    executor: started already; `report` is what its start returned
    compiler: of grammars; None: one for the model's own tokenizer
    on_grammar: called from another thread when a grammar is ready: `step` has something to do then
    clock:    of `EngineStats.reported_at` and of deadlines
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        report: ExecutorReport,
        *,
        dp_rank: int = 0,
        epoch: int = 0,
        compiler: GrammarCompiler | None = None,
        on_grammar: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dp_rank = dp_rank
        self._epoch = epoch
        self._clock = clock
        self._executor = executor
        self._kv_events: KVEventLog | None = None
        if config.scheduler.kv_events:
            self._kv_events = KVEventLog(dp_rank=dp_rank, epoch=epoch, num_kept=NUM_KEPT_KV_BATCHES)
        self._prefix_log = PrefixLog(epoch=epoch)
        self._kv = KVCacheManager(
            num_blocks=report.num_kv_blocks,
            block_size=report.block_size,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            events=self._kv_events,
            prefix_log=self._prefix_log,
            windows=report.kv_windows,
            max_step_tokens=config.scheduler.max_num_batched_tokens,
        )
        self._scheduler = Scheduler(
            config.scheduler,
            self._kv,
            max_model_len=report.max_model_len,
            vocab_size=report.vocab_size,
        )
        if compiler is None:
            path = config.model.path
            compiler = LLGuidanceCompiler(lambda: load_tokenizer(path), vocab_size=report.vocab_size)
        self._compilers = CompilerPool(
            compiler, on_grammar, timeout_s=config.scheduler.grammar_compile_timeout_s, clock=clock
        )
        self._max_steps_in_flight = config.scheduler.max_steps_in_flight
        self._in_flight: deque[tuple[SchedulerOutput, PendingStep]] = deque()
        self.report = msgspec.structs.replace(report, max_model_len=self._scheduler.max_model_len)
        """The executor's report, with max_model_len lowered to what the KV cache holds."""
        if self.report.max_model_len < report.max_model_len:
            log.warning(
                "kv cache holds less than the context length max_model_len=%d kv_cache_tokens=%d",
                report.max_model_len,
                self.report.max_model_len,
            )
        self._clients: dict[str, int] = {}
        # Every front end that ever asked for something.
        self._client_indices: set[int] = set()
        self._pending: defaultdict[int, StepOutputs] = defaultdict(StepOutputs)
        self._num_reports = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._is_lost = False
        self.num_steps = 0
        """Steps whose result was taken over."""
        self.is_paused = False
        """While it is, no step begins; those in flight end, requests keep their place, and deadlines still count."""
        self.is_asleep = False
        """The workers hold no weights and no KV cache, or not all of them do. As in a pause: what comes now, waits."""

    @property
    def has_work(self) -> bool:
        """True while `step` has something to compute or to hand over. Who waits for a grammar does not count."""
        if self._pending or self._in_flight:
            return True
        if self._scheduler.num_open_requests > 0 and not self.is_held:
            return True
        deadline_at = self.next_deadline_at
        return deadline_at is not None and deadline_at <= self._clock()

    @property
    def is_held(self) -> bool:
        """True while no step may begin."""
        return self.is_paused or self.is_asleep

    @property
    def next_deadline_at(self) -> float | None:
        """When `step` has to end a request because its time, or that of its grammar, is up, at the earliest."""
        instants = (self._scheduler.next_deadline_at, self._compilers.next_late_at)
        return min((instant for instant in instants if instant is not None), default=None)

    @property
    def num_unfinished_requests(self) -> int:
        """Waiting and running requests."""
        return self._scheduler.num_unfinished_requests

    @property
    def num_free_places(self) -> int:
        """Requests that may be added before one is refused because the queue is full."""
        return self._scheduler.num_free_places

    def add_request(self, request: EngineCoreRequest) -> None:
        """Take a request. One that is refused gets its output from the next `step`."""
        self._client_indices.add(request.client_index)
        output = self._scheduler.add_request(request)
        if output is None:
            # Not always this request: one that is known already stays as it is.
            known = self._scheduler.get_request(request.request_id)
            assert known is not None
            self._clients[request.request_id] = known.client_index
            spec = request.sampling_params.structured_outputs
            if spec is not None and known.core_request is request:
                self._compilers.submit(request.request_id, request.attempt, spec)
        else:
            if self._scheduler.get_request(request.request_id) is None:
                self._clients.pop(request.request_id, None)
            self._pending[request.client_index].others.append(output)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget requests at once; nothing is answered. Unknown ids are ignored."""
        request_ids = list(request_ids)
        self._scheduler.abort_requests(request_ids)
        self._compilers.forget(request_ids)
        for request_id in request_ids:
            self._clients.pop(request_id, None)

    def abort_client(self, client_index: int) -> int:
        """Forget all requests of a front end that is gone. Returns how many there were."""
        request_ids = self._scheduler.get_request_ids(client_index)
        self.abort_requests(request_ids)
        self._pending.pop(client_index, None)
        return len(request_ids)

    def abort_all(self) -> OutputsByClient:
        """End all requests with finish_reason ABORT; returns these outputs. For a stop."""
        outputs = self._take_pending()
        for request_id in self._scheduler.get_request_ids():
            request = self._scheduler.get_request(request_id)
            assert request is not None
            output = EngineCoreOutput(
                request_id=request_id, attempt=request.attempt, finish_reason=FinishReason.ABORT
            )
            outputs.setdefault(request.client_index, StepOutputs()).others.append(output)
            self.abort_requests([request_id])
        return outputs

    def step(
        self, on_result: Callable[[], None] = lambda: None, on_wait: Callable[[], None] = lambda: None
    ) -> OutputsByClient:
        """Keep the workers busy, take over the oldest step in flight, and return all outputs by client.

        on_wait:   called right before the wait for a result
        on_result: called when a result is there and not taken over yet: an abort that came while the step ran
                   must win over the end that the step brings
        Blocks for the length of a step, at most the executor's step timeout.
        Raises ProcessError when a worker died or failed, or when an earlier step did not end: scheduler and
        workers disagree then on what the KV cache holds.
        """
        if self._is_lost:
            raise ProcessError(
                f"dp{self._dp_rank}", rank=self._dp_rank, detail="a step did not come to its end"
            )
        self._expire()
        # Until all has gone well: whatever is raised here leaves steps in flight that nobody will take over.
        self._is_lost = True
        self._submit()
        if self._in_flight:
            scheduled, step = self._in_flight.popleft()
            on_wait()
            result = step.result()
            now = self._clock()
            self._busy_s += now - self._busy_since
            self._busy_since = now
            self.num_steps += 1
            on_result()
            self._give(self._scheduler.update_from_output(scheduled, result))
            self._submit_masks()
        self._is_lost = False
        return self._take_pending()

    def take_grammars(self, timeout_s: float = 0.0) -> None:
        """Let requests go on whose grammar is ready; wait at most `timeout_s` for the first.

        To be called after `on_grammar`, or instead of it.
        """
        self._resolve(self._compilers.take(timeout_s))

    def _resolve(self, outcomes: Iterable[Compiled]) -> None:
        """Give requests their grammars, or end them. Those that are gone by now are skipped."""
        for compiled in outcomes:
            request = self._scheduler.get_request(compiled.request_id)
            if request is None or request.attempt != compiled.attempt:
                continue
            if compiled.grammar is None:
                assert compiled.error is not None
                refused = self._scheduler.refuse_grammar(
                    compiled.request_id, compiled.error, is_full=compiled.is_overload
                )
                self._give_others([refused])
                continue
            matcher = compiled.grammar.new_matcher(request.end_token_ids)
            output = self._scheduler.set_matcher(compiled.request_id, matcher)
            if output is not None:
                self._give_others([output])

    def _submit(self) -> None:
        """Submit steps until there are as many in flight as may be."""
        while len(self._in_flight) < self._max_steps_in_flight and not self.is_held:
            scheduled = self._scheduler.schedule()
            if scheduled is None:
                break
            if not self._in_flight:
                self._busy_since = self._clock()
            self._in_flight.append((scheduled, self._executor.submit_model(scheduled)))
            if len(self._in_flight) == 1:
                self._submit_masks()

    def _submit_masks(self) -> None:
        """Send the step that has just become the oldest in flight the masks that it waits for."""
        if self._in_flight and self._in_flight[0][0].needs_masks:
            self._executor.submit_masks(self._scheduler.fill_grammar_masks())

    def _expire(self) -> None:
        """End requests whose deadline has passed, and those whose grammar takes too long."""
        deadline_at = self.next_deadline_at
        if deadline_at is not None and (now := self._clock()) >= deadline_at:
            expired = self._scheduler.expire(now)
            self._compilers.forget(output.request_id for output in expired)
            self._give_others(expired)
            self._resolve(self._compilers.give_up_late(now))

    def _give(self, outputs: StepOutputs) -> None:
        """Put what a step made where the clients get it from the next `step`."""
        clients, pending = self._clients, self._pending
        # One front end is what most replicas have: nobody need be looked up.
        if len(self._client_indices) == 1 and outputs.request_ids:
            [client_index] = self._client_indices
            pending[client_index].request_ids.extend(outputs.request_ids)
            pending[client_index].token_ids.extend(outputs.token_ids)
        else:
            for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
                of_client = pending[clients[request_id]]
                of_client.request_ids.append(request_id)
                of_client.token_ids.append(token_id)
        self._give_others(outputs.others)

    def _give_others(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """As `_give`, for outputs that say more than a token."""
        clients, pending = self._clients, self._pending
        for output in outputs:
            request_id = output.request_id
            client_index = clients[request_id] if output.finish_reason is None else clients.pop(request_id)
            pending[client_index].others.append(output)

    def _take_pending(self) -> OutputsByClient:
        outputs = dict(self._pending)
        self._pending.clear()
        return outputs

    def collective_rpc(
        self,
        name: str,
        argument: object = None,
        *,
        result_type: type[T] | None = None,
        timeout_s: float | None = None,
    ) -> list[HookOutcome[T]]:
        """Run a hook on every rank, behind the steps in flight; see Executor."""
        return self._executor.collective_rpc(name, argument, result_type=result_type, timeout_s=timeout_s)

    def take_kv_events(self) -> list[KVEventBatch]:
        """Take what the prefix cache has won and lost since the last call: one batch, or none."""
        batch = self._kv_events.take_batch() if self._kv_events is not None else None
        return [] if batch is None else [batch]

    def replay_kv_events(self, first_sequence: int) -> list[KVEventBatch]:
        """Return the batches from `first_sequence` on, or a snapshot. Call it right after `take_kv_events`."""
        if self._kv_events is None:
            return []
        batches = self._kv_events.replay(first_sequence)
        return [self._kv_events.snapshot()] if batches is None else batches

    def take_prefix_delta(self) -> PrefixDelta | None:
        """Take what has changed in the prefix cache since the last call, while someone follows. None: nothing."""
        return self._prefix_log.take_delta()

    def follow_prefixes(self) -> PrefixDelta:
        """Begin to note changes, and say what is held now. Call it right after `take_prefix_delta`."""
        return self._prefix_log.follow(self._kv.cached_hashes)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing done, while any request holds blocks."""
        return self._scheduler.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Report load and counters, with the next sequence number. O(requests)."""
        self._num_reports += 1
        stats = self._scheduler.stats()
        return EngineStats(
            dp_rank=self._dp_rank,
            epoch=self._epoch,
            sequence=self._num_reports,
            reported_at=self._clock(),
            num_waiting=stats.num_waiting,
            num_running=stats.num_running,
            num_prefill_tokens=stats.num_prefill_tokens,
            kv_usage=stats.kv_usage,
            num_free_blocks=stats.num_free_blocks,
            num_free_tokens=stats.num_free_tokens,
            num_blocks=stats.num_blocks,
            num_running_tokens=stats.num_running_tokens,
            busy_s=self._busy_s,
            num_steps=stats.num_steps,
            num_preemptions=stats.num_preemptions,
            prefix_queried_tokens=stats.prefix_queried_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            num_prefill_tokens_total=stats.num_prefill_tokens_total,
            num_context_tokens_total=stats.num_context_tokens_total,
            num_output_tokens_total=stats.num_output_tokens_total,
        )

    def close(self, *, reason: str) -> None:
        """End the executor and its workers. Bounded by the executor, idempotent."""
        self._compilers.close()
        self._executor.close(reason=reason)
