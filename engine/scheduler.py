"""Decides what the next step computes, and what its result means. Pure: no clock, no socket, no tensor.

Called by: EngineCore, in the main thread of the engine-core process. Several steps may be in flight: `schedule`
is called again before the result of the last step is in; results come in the order of the steps. Requests are
added and aborted at any time between two calls.

There is no prefill and no decode: each request's num_computed_tokens chases its tokens. Chunked prefill, prefix
hits, preemption and a second attempt on another replica are all that one rule. Tokens that steps in flight
sample are placeholders (see request.py): the workers have them, so the next step can be planned.

    add_request -> BLOCKED -> WAITING -> RUNNING -> FINISHED
                                ^           |
                                +-PREEMPTED-+   blocks taken, tokens kept; admitted again before younger ones

Invariants: running requests are sorted by their order, and the victim of a preemption is the last of them, so
no victim was scheduled in the step that preempts it. Every request fits alone in an empty cache, so the first
running request always advances: no live-lock. Every sampled token is taken over exactly once: each step in
flight knows its requests themselves, not their ids, and a request that ended meanwhile takes no more.

Blocks are given back at once, also when a step in flight still reads or writes them. That is sound because
every rank computes the steps in their order: a step that is given such a block again runs after all that were
in flight. What a step in flight writes there late is of no use to anyone, and is never published.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from operator import attrgetter

from ..workers.messages import GrammarMasks, ModelRunnerOutput, SchedulerOutput
from .config import SchedulerConfig
from .deadlines import DeadlineHeap
from .grammar.backend import Matcher
from .kv_cache_manager import KVCacheManager
from .messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from .request import Request, RequestStatus
from .request_queue import RequestQueue
from .scheduler_outputs import fill_grammar_masks, make_output, refuse
from .stats import SchedulerStats
from .step_plan import StepPlan

WATERMARK = 0.01
"""Part of the blocks that an admission leaves free while others run: they grow in the very next steps, and
a request admitted into the last block would be preempted at once."""

_ORDER = attrgetter("order")


class Scheduler:
    """Owner of all requests of one replica.

    max_model_len: longest request in tokens; lowered to what the cache holds
    vocab_size:    of the model: the width of grammar masks
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        *,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self._config = config
        self._kv = kv_cache_manager
        # One more would do, for the last token is never computed; but "no longer than the cache" is simpler.
        self._max_model_len = min(max_model_len, kv_cache_manager.capacity_tokens)
        self._vocab_size = vocab_size
        self._num_watermark_blocks = max(1, int(WATERMARK * kv_cache_manager.num_blocks))
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue(max_overtakes=config.max_overtakes)
        self._running: list[Request] = []
        # The requests that sample in each step in flight, the oldest step first.
        self._in_flight: deque[tuple[int, list[Request]]] = deque()
        # The first admitted request of each group, as long as it runs.
        self._leaders: dict[str, Request] = {}
        self._deadlines = DeadlineHeap()
        # What the workers hold and must drop: told with the next step.
        self._removed_request_ids: list[str] = []
        self._num_arrived = 0
        self._num_blocked = 0
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
    def num_open_requests(self) -> int:
        """Unfinished requests that do not wait for something outside."""
        return len(self._requests) - self._num_blocked

    @property
    def num_free_places(self) -> int:
        """Requests that may be added before one is refused because the queue is full."""
        return max(0, self._config.max_num_waiting - len(self._waiting))

    def add_request(self, core_request: EngineCoreRequest) -> EngineCoreOutput | None:
        """Let a request wait. Returns its only output when it ends here: refused, or nothing left to do.

        A newer attempt replaces an older one; a request that is known already is ignored. One with a grammar is
        passed over until `set_matcher`.
        """
        known = self._requests.get(core_request.request_id)
        if known is not None:
            if core_request.attempt <= known.attempt:
                return None
            self._finish(known)
        self._num_arrived += 1
        request = Request(core_request, number=self._num_arrived, max_model_len=self._max_model_len)
        if core_request.output_token_ids and (stop := request.check_stop()):
            return make_output(request, stop=stop)
        if request.num_tokens >= self._max_model_len:
            return refuse(
                core_request,
                f"a request of {request.num_tokens} tokens leaves no room for output: model and KV cache "
                f"hold {self._max_model_len} tokens",
            )
        if len(self._waiting) >= self._config.max_num_waiting:
            return refuse(core_request, "too many requests are waiting", is_full=True)
        if core_request.sampling_params.structured_outputs is not None:
            request.status = RequestStatus.BLOCKED
            self._num_blocked += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)
        if core_request.deadline_at is not None:
            self._deadlines.add(core_request.deadline_at, request)
        return None

    def set_matcher(self, request_id: str, matcher: Matcher) -> EngineCoreOutput | None:
        """Give a blocked request its grammar; it can be admitted now. Ignored when it is not blocked.

        Returns its last output when the tokens of an earlier attempt do not fit the grammar, or end it.
        """
        request = self._requests.get(request_id)
        if request is None or request.status is not RequestStatus.BLOCKED:
            return None
        output_token_ids = request.token_ids[request.num_prompt_tokens :]
        if not matcher.accept(output_token_ids):
            return self.refuse_request(request_id, "the output so far does not fit the grammar")
        request.matcher = matcher
        request.status = RequestStatus.WAITING
        self._num_blocked -= 1
        if output_token_ids and (stop := request.check_stop()):
            self._finish(request)
            return make_output(request, stop=stop)
        return None

    def refuse_request(self, request_id: str, error: str, *, is_full: bool = False) -> EngineCoreOutput:
        """End an unfinished request that turned out to be wrong, or one too many. Returns its last output."""
        request = self._requests[request_id]
        self._finish(request)
        return refuse(request.core_request, error, is_full=is_full)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget requests, at whatever stage they are. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request)

    def expire(self, now: float) -> list[EngineCoreOutput]:
        """End the requests whose deadline has passed. now: instant of the clock of `deadline_at`."""
        expired = self._deadlines.pop_expired(now)
        for request in expired:
            self._finish(request)
        return [make_output(request, finish_reason=FinishReason.TIMEOUT) for request in expired]

    @property
    def next_deadline_at(self) -> float | None:
        """When `expire` has something to do next, at the earliest."""
        return self._deadlines.next_at

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
        """Decide the next step. None when nothing can be computed before a step in flight is back.

        Running requests come first, in their order, each with at least one token; then waiting ones, unless a
        running one had to be preempted. Rows to remove wait for the next step that computes something.
        """
        plan = StepPlan(budget=self._config.max_num_batched_tokens)
        if not self._schedule_running(plan):
            self._admit_waiting(plan)
        if not plan.num_scheduled_tokens:
            return None
        self._num_steps += 1
        self._in_flight.append((self._num_steps, plan.sampling))
        removed, self._removed_request_ids = self._removed_request_ids, []
        return SchedulerOutput(
            step=self._num_steps,
            new_requests=plan.new_requests,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            num_computed_tokens=plan.num_computed_tokens,
            new_block_ids=plan.new_block_ids,
            removed_request_ids=removed,
            needs_masks=plan.has_grammar,
        )

    def fill_grammar_masks(self) -> GrammarMasks:
        """Say what may come next in the oldest step in flight. To be asked as soon as it is the oldest."""
        return fill_grammar_masks(*self._in_flight[0], self._vocab_size)

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Take over what the oldest step in flight sampled. Returns the outputs of the requests that got a token."""
        step, sampling = self._in_flight.popleft()
        assert output.step == scheduled.step == step, "the result of another step"
        assert len(output.sampled_token_ids) == len(sampling), "scheduler and workers disagree on who samples"
        outputs = []
        for request, token_id in zip(sampling, output.sampled_token_ids, strict=True):
            # Ended while the step was in flight: stopped, aborted, expired, or replaced by a newer attempt.
            if request.status is RequestStatus.FINISHED:
                continue
            # A request that was preempted meanwhile takes its token like any other: it is a valid sample.
            request.num_placeholders -= 1
            if request.matcher is not None and (error := request.reject(token_id)):
                self._finish(request)
                outputs.append(refuse(request.core_request, error, is_invalid=request.has_allowed_tokens))
                continue
            stop = request.append_output_token(token_id)
            self._num_output_tokens_total += 1
            outputs.append(make_output(request, new_token_ids=[token_id], stop=stop, sampled=output))
            if stop is not None:
                self._kv.publish(request)
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
            num_prefill_tokens=sum(one.num_expected_prefill_tokens for one in self._requests.values()),
            num_running_tokens=sum(request.num_computed_tokens for request in self._running),
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
        assert self._running == sorted(self._running, key=_ORDER)
        assert all(leader.status is RequestStatus.RUNNING for leader in self._leaders.values())
        in_flight = [id(request) for _, sampling in self._in_flight for request in sampling]
        for request in self._requests.values():
            assert request.num_placeholders == in_flight.count(id(request))
            assert request.num_tokens + request.num_placeholders <= request.max_num_tokens
        for request in self._running:
            assert request.status is RequestStatus.RUNNING
            assert 0 < request.num_computed_tokens <= request.num_tokens + request.num_placeholders
            assert request.num_computed_tokens <= request.num_slots
            assert self._kv.num_slots(request.request_id) == request.num_slots
        blocked = [request for request in self._waiting if request.status is RequestStatus.BLOCKED]
        assert len(blocked) == self._num_blocked
        for request in self._waiting:
            assert request.status in (RequestStatus.BLOCKED, RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request.num_computed_tokens == 0

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Advance the running requests. True when one of them was preempted for lack of blocks."""
        running = self._running
        num_preemptions_before = self._num_preemptions
        index = 0
        while index < len(running):
            request = running[index]
            index += 1
            num_tokens = len(request.token_ids) + request.num_placeholders
            computed = request.num_computed_tokens
            num_new_tokens = num_tokens - computed
            if num_new_tokens == 0 or (request.num_placeholders and not request.may_run_ahead(num_tokens)):
                continue
            is_prefill = num_new_tokens > 1
            if is_prefill:
                # One token is left for each request that comes after: nobody who decodes misses a step.
                room = plan.budget - (len(running) - index)
                num_new_tokens = min(num_new_tokens, room, self._prefill_limit(request))
            if num_new_tokens > 1 or computed + 1 > request.num_slots:
                new_block_ids = self._kv.allocate_slots(request, num_new_tokens)
                while new_block_ids is None:
                    victim = running[-1]
                    self._preempt(victim)
                    if victim is request:
                        return True
                    new_block_ids = self._kv.allocate_slots(request, num_new_tokens)
                if new_block_ids:
                    plan.new_block_ids[request.request_id] = new_block_ids
            if is_prefill:
                self._num_prefill_tokens_total += num_new_tokens
            plan.add(request, num_new_tokens, samples=computed + num_new_tokens == num_tokens)
        return self._num_preemptions > num_preemptions_before

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Admit waiting requests in their order while sequences, tokens and blocks last."""
        while plan.budget > 0 and len(self._running) < self._config.max_num_seqs:
            request = self._waiting.peek(self._can_be_admitted)
            if request is None:
                break
            hits = self._kv.get_computed_blocks(request)
            num_spare_blocks = self._num_watermark_blocks if self._running else 0
            if not self._kv.has_room_for(request, hits, num_spare_blocks):
                break
            self._waiting.admit(request)
            request.num_computed_tokens = self._kv.num_hit_tokens(hits)
            self._prefix_queried_tokens += request.num_tokens
            self._prefix_hit_tokens += request.num_computed_tokens
            if request.num_cached_tokens is None:
                request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            num_new_tokens = min(request.num_uncomputed_tokens, plan.budget, self._prefill_limit(request))
            new_block_ids = self._kv.allocate_slots(request, num_new_tokens, hits)
            assert new_block_ids is not None, "has_room_for said so"
            request.status = RequestStatus.RUNNING
            insort(self._running, request, key=_ORDER)
            if request.group_id is not None:
                self._leaders.setdefault(request.group_id, request)
            self._num_prefill_tokens_total += num_new_tokens
            plan.new_requests.append(request.to_new_request(self._kv.get_block_ids(request.request_id)))
            plan.add(request, num_new_tokens, samples=num_new_tokens == request.num_uncomputed_tokens)

    def _can_be_admitted(self, request: Request) -> bool:
        if request.status is RequestStatus.BLOCKED or request.num_placeholders:
            # A token on its way would be missing among those that the workers are told.
            return False
        leader = self._leaders.get(request.group_id) if request.group_id is not None else None
        # Siblings share the leader's blocks, which are there once its prompt is computed.
        return leader is None or not self._kv.shares_prefixes or leader.num_prefill_tokens == 0

    def _prefill_limit(self, request: Request) -> int:
        """Return how many prompt tokens a request may compute in one step: a share while other prompts wait."""
        budget = self._config.max_num_batched_tokens
        if len(self._waiting) or any(
            other.num_prefill_tokens > 0 and other is not request for other in self._running
        ):
            return max(1, int(budget * self._config.long_prefill_share))
        return budget

    def _preempt(self, request: Request) -> None:
        """Take the blocks of the last running request; its tokens stay, those on their way too."""
        popped = self._running.pop()
        assert popped is request
        self._release(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self._waiting.put_back(request)
        self._num_preemptions += 1

    def _finish(self, request: Request) -> None:
        """Forget a request."""
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._release(request)
        else:
            self._waiting.remove(request.request_id)
            self._num_blocked -= request.status is RequestStatus.BLOCKED
        request.status = RequestStatus.FINISHED

    def _release(self, request: Request) -> None:
        """Give back what a running request holds, here and on the workers."""
        self._kv.free(request)
        self._removed_request_ids.append(request.request_id)
        if request.group_id is not None and self._leaders.get(request.group_id) is request:
            del self._leaders[request.group_id]
