"""Decides what the next step computes, and what its result means. Pure: no clock, no socket, no tensor.

Called by: EngineCore, in the main thread of the engine-core process. Several steps may be in flight: `schedule`
is called again before the result of the last step is in; results come in the order of the steps. Requests are
added and aborted at any time between two calls.

There is no prefill and no decode: each request's num_computed_tokens chases its tokens. Chunked prefill, prefix
hits, preemption and a second attempt on another replica are all that one rule. Tokens that steps in flight
sample are placeholders (see request.py): the workers have them, so the next step can be planned.

Where each request stands is the business of request_book.py; here is decided who computes how much.

Invariants: running requests are sorted by their order, and the victim of a preemption is the last of them, so
no victim was scheduled in the step that preempts it. Every request fits alone in an empty cache, so the first
running request always advances: no live-lock. Every sampled token is taken over exactly once: each step in
flight knows its requests themselves, not their ids, and a request that ended meanwhile takes no more.

Blocks are given back at once, also when a step in flight still reads or writes them. That is sound because
every rank computes the steps in their order: a step that is given such a block again runs after all that were
in flight. What a step in flight writes there late is of no use to anyone, and is never published.
"""

from collections import deque
from collections.abc import Iterable

from ..workers.messages import GrammarMasks, ModelRunnerOutput, SchedulerOutput
from .config import SchedulerConfig
from .grammar.backend import Matcher
from .kv_cache_manager import KVCacheManager
from .messages import EngineCoreOutput, EngineCoreRequest, FinishReason, StepOutputs
from .pacing import Pacer
from .request import Request, RequestStatus
from .request_book import RequestBook
from .scheduler_outputs import describe_rows, fill_grammar_masks, make_output, refuse
from .stats import SchedulerStats
from .step_plan import StepPlan

WATERMARK = 0.01
"""Part of the blocks that an admission leaves free while others run: they grow in the very next steps, and
a request admitted into the last block would be preempted at once."""


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
        self._book = RequestBook(kv_cache_manager, max_overtakes=config.max_overtakes)
        self._pacer: Pacer | None = None
        if config.paced_step_tokens is not None:
            self._pacer = Pacer(
                step_tokens=config.paced_step_tokens,
                most=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
            )
        # Number, requests that sample, and prefill tokens of each step in flight, the oldest step first.
        self._in_flight: deque[tuple[int, list[Request], int]] = deque()
        self._num_arrived = 0
        self._num_steps = 0
        self._num_steps_done = 0
        self._num_preemptions = 0
        self._prefix_queried_tokens = 0
        self._prefix_hit_tokens = 0
        self._num_prefill_tokens_total = 0
        self._num_context_tokens_total = 0
        self._num_output_tokens_total = 0

    @property
    def max_model_len(self) -> int:
        """Longest request in tokens: of the model, or what the KV cache holds when that is less."""
        return self._max_model_len

    @property
    def num_unfinished_requests(self) -> int:
        """Waiting and running requests."""
        return len(self._book)

    @property
    def num_open_requests(self) -> int:
        """Unfinished requests that do not wait for something outside."""
        return len(self._book) - self._book.num_blocked

    @property
    def num_free_places(self) -> int:
        """Requests that may be added before one is refused because the queue is full."""
        return max(0, self._config.max_num_waiting - len(self._book.waiting))

    def add_request(self, core_request: EngineCoreRequest) -> EngineCoreOutput | None:
        """Let a request wait. Returns its only output when it ends here: refused, or nothing left to do.

        A newer attempt replaces an older one; a request that is known already is ignored. One with a grammar is
        passed over until `set_matcher`.
        """
        known = self._book.get(core_request.request_id)
        if known is not None:
            if core_request.attempt <= known.attempt:
                return None
            self._book.finish(known)
        self._num_arrived += 1
        request = Request(core_request, number=self._num_arrived, max_model_len=self._max_model_len)
        if core_request.output_token_ids and (stop := request.check_stop()):
            return make_output(request, stop=stop)
        if request.num_tokens >= self._max_model_len:
            return refuse(
                core_request,
                f"a request of {request.num_tokens} tokens leaves no room for output: model and KV cache "
                f"hold {self._max_model_len} tokens",
                field="prompt",
            )
        # One that another replica has begun was let in there, and its client may hold a part of the answer.
        if core_request.attempt == 0 and len(self._book.waiting) >= self._config.max_num_waiting:
            return refuse(core_request, "too many requests are waiting", is_full=True)
        self._book.add(request)
        return None

    def set_matcher(self, request_id: str, matcher: Matcher) -> EngineCoreOutput | None:
        """Give a blocked request its grammar; it can be admitted now. Ignored when it is not blocked.

        Returns its last output when the tokens of an earlier attempt do not fit the grammar, or end it.
        """
        request = self._book.get(request_id)
        if request is None or request.status is not RequestStatus.BLOCKED:
            return None
        output_token_ids = request.token_ids[request.num_prompt_tokens :]
        if not matcher.accept(output_token_ids):
            return self.refuse_grammar(request_id, "the output so far does not fit the grammar")
        request.matcher = matcher
        self._book.unblock(request)
        if output_token_ids and (stop := request.check_stop()):
            self._book.finish(request)
            return make_output(request, stop=stop)
        return None

    def refuse_grammar(self, request_id: str, error: str, *, is_full: bool = False) -> EngineCoreOutput:
        """End an unfinished request whose grammar is wrong, or one too many. Returns its last output."""
        request = self._book.get(request_id)
        assert request is not None, "the request has ended already"
        self._book.finish(request)
        return refuse(request.core_request, error, is_full=is_full, field="structured_outputs")

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget requests, at whatever stage they are. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self._book.get(request_id)
            if request is not None:
                self._book.finish(request)

    def expire(self, now: float) -> list[EngineCoreOutput]:
        """End the requests whose deadline has passed. now: instant of the clock of `deadline_at`."""
        expired = self._book.pop_expired(now)
        for request in expired:
            self._book.finish(request)
        return [make_output(request, finish_reason=FinishReason.TIMEOUT) for request in expired]

    @property
    def next_deadline_at(self) -> float | None:
        """When `expire` has something to do next, at the earliest."""
        return self._book.next_deadline_at

    def get_request_ids(self, client_index: int | None = None) -> list[str]:
        """Name the unfinished requests, of one front end or of all."""
        return [
            request.request_id
            for request in self._book
            if client_index is None or request.client_index == client_index
        ]

    def get_request(self, request_id: str) -> Request | None:
        """Look up an unfinished request."""
        return self._book.get(request_id)

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step. None when nothing can be computed before a step in flight is back.

        Running requests come first, in their order, each with at least one token; then waiting ones, unless a
        running one had to be preempted. Rows to remove wait for the next step that computes something.
        """
        budget = self._config.max_num_batched_tokens
        if self._pacer is not None:
            book = self._book
            budget = self._pacer.budget(book.running, book.waiting, len(book.waiting))
        plan = StepPlan(budget=budget)
        if not self._schedule_running(plan):
            self._admit_waiting(plan)
        if not plan.num_scheduled_tokens:
            return None
        self._num_steps += 1
        self._in_flight.append((self._num_steps, plan.sampling, plan.num_prefill_tokens))
        return SchedulerOutput(
            step=self._num_steps,
            new_requests=plan.new_requests,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            num_computed_tokens=plan.num_computed_tokens,
            new_block_ids=plan.new_block_ids,
            removed_request_ids=self._book.take_removed_request_ids(),
            needs_masks=plan.has_grammar,
            row_states=(
                describe_rows(self._book.running, plan, self._kv) if self._config.check_worker_rows else {}
            ),
        )

    def fill_grammar_masks(self) -> GrammarMasks:
        """Say what may come next in the oldest step in flight. To be asked as soon as it is the oldest."""
        step, sampling, _ = self._in_flight[0]
        return fill_grammar_masks(step, sampling, self._vocab_size)

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> StepOutputs:
        """Take over what the oldest step in flight sampled. Returns what there is to say of those that got a token."""
        step, sampling, num_prefill_tokens = self._in_flight.popleft()
        assert output.step == scheduled.step == step, "the result of another step"
        assert len(output.sampled_token_ids) == len(sampling), "scheduler and workers disagree on who samples"
        # Counted now, not when it was planned: what the time of the steps is compared with must be of the same steps.
        self._num_steps_done = step
        self._num_prefill_tokens_total += num_prefill_tokens
        self._num_context_tokens_total += sum(scheduled.num_computed_tokens)
        outputs = StepOutputs()
        # Looked up once: this loop, and that of `_schedule_running`, are what a step costs for each request.
        finished = RequestStatus.FINISHED
        request_ids, token_ids = outputs.request_ids, outputs.token_ids
        for request, token_id in zip(sampling, output.sampled_token_ids, strict=True):
            # Ended while the step was in flight: stopped, aborted, expired, or replaced by a newer attempt.
            if request.status is finished:
                continue
            # A request that was preempted meanwhile takes its token like any other: it is a valid sample.
            if request.matcher is not None and (rejection := request.reject(token_id)):
                self._book.finish(request)
                refused = refuse(
                    request.core_request,
                    rejection.error,
                    is_invalid=rejection.field is not None,
                    field=rejection.field,
                )
                outputs.others.append(refused)
                continue
            stop = request.append_output_token(token_id)
            if stop is None and request.is_plain:
                request_ids.append(request.request_id)
                token_ids.append(token_id)
                continue
            outputs.others.append(make_output(request, new_token_ids=[token_id], stop=stop, sampled=output))
            if stop is not None:
                self._kv.publish(request)
                self._book.finish(request)
        num_more = sum(len(other.new_token_ids) for other in outputs.others)
        self._num_output_tokens_total += len(token_ids) + num_more
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing done, while any request holds blocks."""
        return self._kv.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        """Take the load and the counters. O(requests)."""
        return SchedulerStats(
            num_waiting=len(self._book.waiting),
            num_running=len(self._book.running),
            num_prefill_tokens=sum(one.num_expected_prefill_tokens for one in self._book),
            num_running_tokens=sum(request.num_computed_tokens for request in self._book.running),
            kv_usage=self._kv.usage,
            num_free_blocks=self._kv.num_free_blocks,
            num_free_tokens=self._kv.num_free_tokens,
            num_blocks=self._kv.num_blocks,
            num_steps=self._num_steps_done,
            num_preemptions=self._num_preemptions,
            prefix_queried_tokens=self._prefix_queried_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            num_prefill_tokens_total=self._num_prefill_tokens_total,
            num_context_tokens_total=self._num_context_tokens_total,
            num_output_tokens_total=self._num_output_tokens_total,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when the books are wrong. For tests and debugging."""
        self._kv.check_invariants()
        self._book.check_invariants()
        assert len(self._book.running) <= self._config.max_num_seqs
        in_flight = [id(request) for _, sampling, _ in self._in_flight for request in sampling]
        for request in self._book:
            assert request.num_placeholders == in_flight.count(id(request))
            assert request.num_tokens + request.num_placeholders <= request.max_num_tokens

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Advance the running requests. True when one of them was preempted for lack of blocks."""
        running = self._book.running
        counts, starts, sampling = plan.num_scheduled_tokens, plan.num_computed_tokens, plan.sampling
        has_preempted = False
        # A preemption takes from the end of the list, behind the request that asks for blocks.
        for index, request in enumerate(running, 1):
            computed = request.num_computed_tokens
            num_tokens = request.num_coming_tokens
            num_new_tokens = num_tokens - computed
            if num_new_tokens == 0 or (num_tokens >= request.max_num_tokens and request.num_placeholders):
                # Its token is on the way still, or it is the last one, whatever it is.
                continue
            if num_new_tokens == 1 and computed < request.num_slots:
                # Decodes into a block that it has, as nearly all do: `plan.add` without a call for each request.
                counts[request.request_id] = 1
                starts.append(computed)
                sampling.append(request)
                request.num_computed_tokens = num_tokens
                request.num_coming_tokens = num_tokens + 1
                plan.budget -= 1
                if request.matcher is not None:
                    plan.has_grammar = True
                continue
            if num_new_tokens > 1:
                # One token is left for each request that comes after: nobody who decodes misses a step.
                room = plan.budget - (len(running) - index)
                num_new_tokens = min(num_new_tokens, room, self._prefill_limit(request))
            new_block_ids = self._kv.allocate_slots(request, num_new_tokens)
            while new_block_ids is None:
                has_preempted = True
                self._num_preemptions += 1
                if self._book.preempt_last() is request:
                    return True
                new_block_ids = self._kv.allocate_slots(request, num_new_tokens)
            if new_block_ids:
                plan.new_block_ids[request.request_id] = new_block_ids
            if num_tokens - computed > 1:
                plan.num_prefill_tokens += num_new_tokens
            plan.add(request, num_new_tokens, samples=computed + num_new_tokens == num_tokens)
        return has_preempted

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Admit waiting requests in their order while sequences, tokens and blocks last."""
        book = self._book
        while plan.budget > 0 and len(book.running) < self._config.max_num_seqs:
            request = book.waiting.peek(book.can_be_admitted)
            if request is None:
                break
            hits = self._kv.get_computed_blocks(request)
            num_spare_blocks = self._num_watermark_blocks if book.running else 0
            if not self._kv.has_room_for(request, hits, num_spare_blocks):
                break
            book.admit(request)
            request.num_computed_tokens = self._kv.num_hit_tokens(hits)
            self._prefix_queried_tokens += request.num_tokens
            self._prefix_hit_tokens += request.num_computed_tokens
            if request.num_cached_tokens is None:
                request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            num_new_tokens = min(request.num_uncomputed_tokens, plan.budget, self._prefill_limit(request))
            new_block_ids = self._kv.allocate_slots(request, num_new_tokens, hits)
            assert new_block_ids is not None, "has_room_for said so"
            plan.num_prefill_tokens += num_new_tokens
            plan.new_requests.append(request.to_new_request(self._kv.get_block_ids(request.request_id)))
            plan.add(request, num_new_tokens, samples=num_new_tokens == request.num_uncomputed_tokens)

    def _prefill_limit(self, request: Request) -> int:
        """Return how many prompt tokens a request may compute in one step: a share while other prompts wait."""
        budget = self._config.max_num_batched_tokens
        if len(self._book.waiting) or any(
            other.num_prefill_tokens > 0 and other is not request for other in self._book.running
        ):
            return max(1, int(budget * self._config.long_prefill_share))
        return budget
