"""One request as the scheduler sees it, and the rule that says when it ends.

Called by: Scheduler and KVCacheManager. Lives in the engine-core process only, in its main thread.

Steps may be in flight: submitted, and not back yet. The token that such a step samples is a placeholder: it
counts for what can be scheduled next, because the workers have it by then, but nobody here knows what it is.

    token_ids            [prompt .......... | output ....... ] placeholders
    num_computed_tokens  ------------------------------------------->|

Invariant: num_computed_tokens <= num_tokens + num_placeholders. Whether a request is being prefilled follows
from these counters, never from "has no output yet": a request that was preempted, or that lost its replica,
has outputs and is prefilled again.
"""

from dataclasses import dataclass
from enum import StrEnum

from ..workers.messages import NewRequest
from .block_hash import ExtraKey, extra_keys_of
from .grammar.backend import Matcher
from .messages import EngineCoreRequest, FinishReason


class RequestStatus(StrEnum):
    """Where a request stands."""

    BLOCKED = "blocked"
    """Waits for something outside the scheduler, and steps aside in the queue: its grammar is being compiled."""
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waits again: its blocks were taken, its tokens are kept."""
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a grammar takes no token. field: of the client's, that cannot go on; None: the fault is ours."""

    error: str
    field: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why a request ends: the reason, and the stop token when it was one of the client's."""

    finish_reason: FinishReason
    stop_reason: int | None = None


class Request:
    """State of one request. Owner: the scheduler.

    order:               what comes first: (priority, number of arrival); the smallest is first
    token_ids:           prompt tokens, then output tokens that are known
    num_coming_tokens:   length of token_ids when all steps in flight are back: known tokens and placeholders
    num_computed_tokens: tokens whose KV is in the cache, or is computed by a step that was scheduled
    num_slots:           tokens that its blocks have room for; written by the KVCacheManager
    num_cached_tokens:   prompt tokens that the prefix cache gave at first admission; None before it
    has_begun:           its first output was made, which tells of its cached tokens
    is_plain:            it has begun, and until it ends there is nothing to say of it but its tokens
    max_num_tokens:      prompt and output tokens at which the request ends, whatever they are
    known_output_len:    output tokens that it makes in any case; None: it may end earlier
    end_token_ids:       tokens that may end it: the model's own and the client's
    extra_keys:          what its blocks depend on beside the tokens
    block_hashes:        chained hashes of the full blocks of token_ids, as far as they were needed
    matcher:             state of its grammar, moved by every known output token; None without one
    num_overtaken:       admissions that passed it by while it was the oldest that waits
    """

    __slots__ = (
        "_min_num_tokens",
        "attempt",
        "block_hashes",
        "client_index",
        "core_request",
        "end_token_ids",
        "extra_keys",
        "group_id",
        "has_begun",
        "is_plain",
        "known_output_len",
        "matcher",
        "max_num_tokens",
        "num_cached_tokens",
        "num_coming_tokens",
        "num_computed_tokens",
        "num_overtaken",
        "num_prompt_tokens",
        "num_slots",
        "order",
        "request_id",
        "status",
        "token_ids",
    )

    def __init__(self, core_request: EngineCoreRequest, *, number: int, max_model_len: int) -> None:
        params = core_request.sampling_params
        self.core_request = core_request
        self.request_id = core_request.request_id
        self.client_index = core_request.client_index
        self.attempt = core_request.attempt
        self.group_id = core_request.group_id
        self.order = (core_request.priority, number)
        self.token_ids = [*core_request.prompt_token_ids, *core_request.output_token_ids]
        self.num_prompt_tokens = len(core_request.prompt_token_ids)
        self.num_coming_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_slots = 0
        self.num_cached_tokens: int | None = None
        self.has_begun = False
        self.is_plain = False
        self.max_num_tokens = max_model_len
        if params.max_tokens is not None:
            self.max_num_tokens = min(max_model_len, self.num_prompt_tokens + params.max_tokens)
        self.known_output_len = params.known_output_len
        if self.known_output_len is not None:
            self.known_output_len = min(self.known_output_len, max_model_len - self.num_prompt_tokens)
        self.extra_keys: tuple[ExtraKey, ...] = extra_keys_of(core_request.cache_salt)
        self.block_hashes: list[bytes] = list(core_request.block_hashes)
        self.status = RequestStatus.WAITING
        self.matcher: Matcher | None = None
        self.num_overtaken = 0
        self._min_num_tokens = self.num_prompt_tokens + max(1, params.min_tokens)
        eos_token_ids = core_request.eos_token_ids
        if params.ignore_eos and params.structured_outputs is None:
            eos_token_ids = ()
        # Where a grammar has ended nothing but an end token can follow, whether it is to be ignored or not.
        self.end_token_ids = frozenset((*eos_token_ids, *params.stop_token_ids))

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known so far, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_placeholders(self) -> int:
        """Tokens that steps in flight sample."""
        return self.num_coming_tokens - len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that the workers have, or will have by the next step, and that no step computes yet."""
        return self.num_coming_tokens - self.num_computed_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens still to be prefilled; 0 for a request that decodes, one token at a time."""
        num_uncomputed = self.num_uncomputed_tokens
        return 0 if self.num_computed_tokens > 0 and num_uncomputed <= 1 else num_uncomputed

    @property
    def num_expected_prefill_tokens(self) -> int:
        """As `num_prefill_tokens`, without those that the prefix cache is expected to give at admission."""
        num_tokens = self.num_prefill_tokens
        if self.num_computed_tokens == 0:
            num_tokens = max(1, num_tokens - self.core_request.num_expected_cached_tokens)
        return num_tokens

    @property
    def needs_whole_prompt(self) -> bool:
        """True when something is asked of every prompt token, so that none may come from the prefix cache."""
        has_output = len(self.token_ids) > self.num_prompt_tokens
        return self.core_request.sampling_params.prompt_logprobs is not None and not has_output

    def begin_output(self) -> None:
        """Note that the first output is being made."""
        self.has_begun = True
        self.is_plain = (
            self.attempt == 0 and self.matcher is None and self.core_request.sampling_params.logprobs is None
        )

    def reject(self, token_id: int) -> Rejection | None:
        """Move the grammar on by a sampled token. Returns what is wrong with the request when it cannot go on."""
        if self.matcher is None:
            return None
        allowed = self.core_request.sampling_params.allowed_token_ids
        # The sampler prefers the grammar where both together leave nothing.
        if allowed is not None and token_id not in allowed:
            error = "allowed_token_ids: the grammar of structured_outputs allows none of them here"
            return Rejection(error=error, field="allowed_token_ids")
        if self.matcher.accept((token_id,)):
            return None
        problem = self.matcher.problem
        if problem is None:
            return Rejection(error="the output left its grammar")
        return Rejection(error=f"structured_outputs: {problem}", field="structured_outputs")

    def append_output_token(self, token_id: int) -> Stop | None:
        """Take over a sampled token, and say whether it ends the request."""
        token_ids = self.token_ids
        token_ids.append(token_id)
        # Nearly always so, and once for each token that is made.
        if (
            token_id not in self.end_token_ids
            and len(token_ids) < self.max_num_tokens
            and self.matcher is None
        ):
            return None
        return self.check_stop()

    def check_stop(self) -> Stop | None:
        """Say whether the last token ends the request.

        An end token wins over a full length. `min_tokens` holds back end tokens, never lengths, and not the end
        of a grammar, after which nothing else may come.
        """
        num_tokens = len(self.token_ids)
        last = self.token_ids[-1]
        if last in self.end_token_ids and (
            num_tokens >= self._min_num_tokens or (self.matcher is not None and self.matcher.is_finished)
        ):
            if num_tokens > self.num_prompt_tokens:
                is_eos = last in self.core_request.eos_token_ids
                return Stop(finish_reason=FinishReason.STOP, stop_reason=None if is_eos else last)
        if self.matcher is not None and self.matcher.is_finished and not self.end_token_ids:
            return Stop(finish_reason=FinishReason.STOP)
        if num_tokens >= self.max_num_tokens:
            return Stop(finish_reason=FinishReason.LENGTH)
        return None

    def to_new_request(self, block_ids: list[int]) -> NewRequest:
        """Describe the request to workers that do not hold it. All its tokens must be known."""
        assert self.num_placeholders == 0
        return NewRequest(
            request_id=self.request_id,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=block_ids,
            sampling_params=self.core_request.sampling_params,
            seed=self.core_request.seed,
            # min_tokens holds back the model's own ends also where they are ignored.
            stop_token_ids=tuple(sorted({*self.end_token_ids, *self.core_request.eos_token_ids})),
            vocab_limit=self.core_request.vocab_limit,
        )
