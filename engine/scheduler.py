"""Decides what the next step computes, and what its result means. Pure: no clock, no socket, no tensor.

Called by: EngineCore, in the main thread of the engine-core process. `schedule()` and
`update_from_output()` alternate; requests are added and aborted between them.

There is no prefill and no decode: each request's num_computed_tokens chases its num_tokens. Chunked
prefill, prefix hits, preemption and a second attempt on another replica are all that one rule.

    add_request -> WAITING -> RUNNING -> FINISHED
                     ^           |
                     +-PREEMPTED-+   blocks taken, tokens kept; waits at the front

Invariants: running requests are ordered by admission, and the victim of a preemption is the last of them,
so no victim was scheduled in the step that preempts it. Every request fits alone in an empty cache, so the
first running request always advances: no live-lock. num_computed_tokens moves when a step is scheduled;
what depends on its result moves in `update_from_output`, which ignores requests that ended meanwhile.
"""

from collections.abc import Iterable

from ..workers.messages import ModelRunnerOutput, NewRequest, RunningRequest, SchedulerOutput
from .config import SchedulerConfig
from .kv_cache_manager import KVCacheManager
from .messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from .request import Request, RequestStatus, Stop
from .request_queue import RequestQueue
from .stats import SchedulerStats

RETRY_AFTER_S = 1.0
"""What a client is told to wait when the queue is full: about the time of a few hundred decode steps' worth
of finished requests; no finer estimate is worth its cost."""

WATERMARK = 0.01
"""Part of the blocks that an admission leaves free while others run: they grow in the very next steps, and
a request admitted into the last block would be preempted at once."""


class Scheduler:
    """Owner of all requests of one replica.

    max_model_len: longest request in tokens; lowered to what the cache holds
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, *, max_model_len: int
    ) -> None:
        self._config = config
        self._kv = kv_cache_manager
        # The last token of a request is never computed, so one more than the capacity would do; the plain
        # capacity keeps the sentence simple: no request is longer than the cache.
        self._max_model_len = min(max_model_len, kv_cache_manager.capacity_tokens)
        self._num_watermark_blocks = max(1, int(WATERMARK * kv_cache_manager.num_blocks))
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue()
        self._running: list[Request] = []
        # What the workers hold and must drop: told with the next step.
        self._removed_request_ids: list[str] = []
        self._num_steps = 0
        self._num_preemptions = 0
        self._prefix_queried_tokens = 0
        self._prefix_hit_tokens = 0
        self._num_prefill_tokens_total = 0
        self._num_output_tokens_total = 0

    @property
    def max_model_len(self) -> int:
        """Longest request in tokens: of the model, or what the KV cache holds when that is less."""
        return self._max_model_len

    @property
    def num_unfinished_requests(self) -> int:
        """Waiting and running requests."""
        return len(self._requests)

    @property
    def num_free_places(self) -> int:
        """Requests that may be added before one is refused because the queue is full."""
        return max(0, self._config.max_num_waiting - len(self._waiting))

    def add_request(self, core_request: EngineCoreRequest) -> EngineCoreOutput | None:
        """Let a request wait. Returns its only output when it ends here: refused, or nothing left to do.

        A newer attempt replaces an older one; a request that is known already is ignored.
        """
        known = self._requests.get(core_request.request_id)
        if known is not None:
            if core_request.attempt <= known.attempt:
                return None
            self._finish(known)
        request = Request(core_request)
        if core_request.output_token_ids and (stop := request.check_stop(self._max_model_len)):
            return _to_output(request, stop=stop)
        if request.num_tokens >= self._max_model_len:
            return _refuse(
                core_request,
                f"a request of {request.num_tokens} tokens leaves no room for output: model and KV cache "
                f"hold {self._max_model_len} tokens",
            )
        if len(self._waiting) >= self._config.max_num_waiting:
            return _refuse(core_request, "too many requests are waiting", retry_after_s=RETRY_AFTER_S)
        self._requests[request.request_id] = request
        self._waiting.append(request)
        return None

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget requests, at whatever stage they are. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request)

    def get_request_ids(self, client_index: int | None = None) -> list[str]:
        """Name the unfinished requests, of one front end or of all."""
        return [
            request.request_id
            for request in self._requests.values()
            if client_index is None or request.client_index == client_index
        ]

    def get_request(self, request_id: str) -> Request | None:
        """Look up an unfinished request."""
        return self._requests.get(request_id)

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step. None when there is nothing to compute.

        Running requests come first, in order of admission; then waiting ones, unless a running one had to
        be preempted. Rows to remove wait for the next step that computes something.
        """
        budget = self._config.max_num_batched_tokens
        num_scheduled: dict[str, int] = {}
        running, num_preempted = self._schedule_running(budget, num_scheduled)
        budget -= sum(num_scheduled.values())
        new = [] if num_preempted else self._admit_waiting(budget, num_scheduled)
        if not num_scheduled:
            return None
        self._num_steps += 1
        removed, self._removed_request_ids = self._removed_request_ids, []
        return SchedulerOutput(
            step=self._num_steps,
            new_requests=new,
            running_requests=running,
            num_scheduled_tokens=num_scheduled,
            removed_request_ids=removed,
        )

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Take over what a step sampled. Returns the outputs of the requests that got a token."""
        assert output.step == scheduled.step, "the result of another step"
        outputs = []
        for request_id, token_id in zip(output.request_ids, output.sampled_token_ids, strict=True):
            request = self._requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            request.append_output_token(token_id)
            self._num_output_tokens_total += 1
            stop = request.check_stop(self._max_model_len)
            outputs.append(_to_output(request, new_token_ids=[token_id], stop=stop))
            if stop is not None:
                self._finish(request)
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing done, while any request holds blocks."""
        return self._kv.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        """Take the load and the counters. O(requests)."""
        return SchedulerStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_prefill_tokens=sum(request.num_prefill_tokens for request in self._requests.values()),
            kv_usage=self._kv.usage,
            num_free_blocks=self._kv.num_free_blocks,
            num_blocks=self._kv.num_blocks,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            prefix_queried_tokens=self._prefix_queried_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            num_prefill_tokens_total=self._num_prefill_tokens_total,
            num_output_tokens_total=self._num_output_tokens_total,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when the books are wrong. For tests and debugging."""
        self._kv.check_invariants()
        running_ids = [request.request_id for request in self._running]
        waiting_ids = [request.request_id for request in self._waiting]
        assert len(running_ids) <= self._config.max_num_seqs
        assert sorted(running_ids + waiting_ids) == sorted(self._requests)
        for request in self._running:
            assert request.status is RequestStatus.RUNNING
            assert 0 < request.num_computed_tokens <= request.num_tokens < self._max_model_len
            num_slots = len(self._kv.get_block_ids(request.request_id)) * self._kv.block_size
            assert request.num_computed_tokens <= num_slots
        for request in self._waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request.num_computed_tokens == 0

    def _schedule_running(
        self, budget: int, num_scheduled: dict[str, int]
    ) -> tuple[list[RunningRequest], int]:
        """Advance the running requests; preempt from the end where blocks are missing."""
        scheduled: list[RunningRequest] = []
        num_preempted = 0
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            index += 1
            num_new_tokens = min(request.num_uncomputed_tokens, budget)
            if num_new_tokens == 0:
                continue
            new_block_ids = self._kv.allocate_slots(request, num_new_tokens)
            while new_block_ids is None:
                victim = self._running[-1]
                self._preempt(victim)
                num_preempted += 1
                if victim is request:
                    return scheduled, num_preempted
                new_block_ids = self._kv.allocate_slots(request, num_new_tokens)
            scheduled.append(RunningRequest(request.request_id, request.num_computed_tokens, new_block_ids))
            self._advance(request, num_new_tokens, num_scheduled)
            budget -= num_new_tokens
        return scheduled, num_preempted

    def _admit_waiting(self, budget: int, num_scheduled: dict[str, int]) -> list[NewRequest]:
        """Admit waiting requests in order while sequences, tokens and blocks last."""
        admitted: list[NewRequest] = []
        while budget > 0 and len(self._running) < self._config.max_num_seqs:
            request = self._waiting.peek()
            if request is None:
                break
            hits = self._kv.get_computed_blocks(request)
            num_spare_blocks = self._num_watermark_blocks if self._running else 0
            if not self._kv.has_room_for(request, hits, num_spare_blocks):
                break
            self._waiting.pop()
            request.num_computed_tokens = len(hits) * self._kv.block_size
            self._prefix_queried_tokens += request.num_tokens
            self._prefix_hit_tokens += request.num_computed_tokens
            if request.num_cached_tokens is None:
                request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            num_new_tokens = min(request.num_uncomputed_tokens, budget)
            new_block_ids = self._kv.allocate_slots(request, num_new_tokens, hits)
            assert new_block_ids is not None, "has_room_for said so"
            request.status = RequestStatus.RUNNING
            self._running.append(request)
            admitted.append(request.to_new_request(self._kv.get_block_ids(request.request_id)))
            self._advance(request, num_new_tokens, num_scheduled)
            budget -= num_new_tokens
        return admitted

    def _advance(self, request: Request, num_new_tokens: int, num_scheduled: dict[str, int]) -> None:
        self._num_prefill_tokens_total += min(num_new_tokens, request.num_prefill_tokens)
        num_scheduled[request.request_id] = num_new_tokens
        request.num_computed_tokens += num_new_tokens

    def _preempt(self, request: Request) -> None:
        """Take the blocks of the last running request; its tokens stay, and it is next to be admitted."""
        popped = self._running.pop()
        assert popped is request
        self._kv.free(request.request_id)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self._waiting.prepend(request)
        self._removed_request_ids.append(request.request_id)
        self._num_preemptions += 1

    def _finish(self, request: Request) -> None:
        """Forget a request: finished, aborted or replaced."""
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._kv.free(request.request_id)
            self._removed_request_ids.append(request.request_id)
        else:
            self._waiting.remove(request.request_id)
        request.status = RequestStatus.FINISHED


def _to_output(
    request: Request, *, new_token_ids: list[int] | None = None, stop: Stop | None
) -> EngineCoreOutput:
    num_cached_tokens = 0
    if not request.has_reported_cached_tokens:
        request.has_reported_cached_tokens = True
        num_cached_tokens = request.num_cached_tokens or 0
    return EngineCoreOutput(
        request_id=request.request_id,
        attempt=request.attempt,
        new_token_ids=new_token_ids or [],
        finish_reason=stop.finish_reason if stop else None,
        stop_reason=stop.stop_reason if stop else None,
        num_cached_tokens=num_cached_tokens,
    )


def _refuse(
    request: EngineCoreRequest, error: str, *, retry_after_s: float | None = None
) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request.request_id,
        attempt=request.attempt,
        finish_reason=FinishReason.ERROR,
        error=error,
        is_invalid=retry_after_s is None,
        retry_after_s=retry_after_s,
    )
