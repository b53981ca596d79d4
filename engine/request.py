"""One request as the scheduler sees it, and the rule that says when it ends.

Called by: Scheduler and KVCacheManager. Lives in the engine-core process only, in its main thread.
Invariant: num_computed_tokens <= num_tokens, and a step brings the former closer to the latter. Whether
a request is being prefilled follows from these counters, never from "has no output yet": a request that
was preempted, or that lost its replica, has outputs and is prefilled again.
"""

from dataclasses import dataclass
from enum import StrEnum

from ..workers.messages import NewRequest
from .messages import EngineCoreRequest, FinishReason


class RequestStatus(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waits again: its blocks were taken, its tokens are kept."""
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why a request ends: the reason, and the stop token when it was one of the client's."""

    finish_reason: FinishReason
    stop_reason: int | None = None


class Request:
    """State of one request. Owner: the scheduler.

    token_ids:            prompt tokens, then output tokens
    num_computed_tokens:  tokens whose KV is in the cache, or is computed by the step that was scheduled last
    num_cached_tokens:    prompt tokens that the prefix cache gave at first admission; None before it
    block_hashes:         chained hashes of the full blocks of token_ids, as far as they were needed
    """

    __slots__ = (
        "_max_output_tokens",
        "_stop_token_ids",
        "attempt",
        "block_hashes",
        "client_index",
        "core_request",
        "has_reported_cached_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "request_id",
        "status",
        "token_ids",
    )

    def __init__(self, core_request: EngineCoreRequest) -> None:
        self.core_request = core_request
        self.request_id = core_request.request_id
        self.client_index = core_request.client_index
        self.attempt = core_request.attempt
        self.token_ids = [*core_request.prompt_token_ids, *core_request.output_token_ids]
        self.num_prompt_tokens = len(core_request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.has_reported_cached_tokens = False
        self.block_hashes: list[bytes] = []
        self.status = RequestStatus.WAITING
        self._max_output_tokens = core_request.sampling_params.max_tokens
        self._stop_token_ids = frozenset(core_request.sampling_params.stop_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that must still be computed before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens still to be prefilled; 0 for a request that decodes, one token at a time."""
        num_uncomputed = self.num_uncomputed_tokens
        return 0 if self.num_computed_tokens > 0 and num_uncomputed <= 1 else num_uncomputed

    def append_output_token(self, token_id: int) -> None:
        """Take over a sampled token."""
        self.token_ids.append(token_id)

    def check_stop(self, max_model_len: int) -> Stop | None:
        """Say whether the last token ends the request.

        An end-of-sequence token wins over a full length. `min_tokens` holds back tokens, never lengths.
        """
        num_output_tokens = self.num_output_tokens
        if num_output_tokens > 0 and num_output_tokens >= self.core_request.sampling_params.min_tokens:
            last = self.token_ids[-1]
            if last in self.core_request.eos_token_ids:
                return Stop(finish_reason=FinishReason.STOP)
            if last in self._stop_token_ids:
                return Stop(finish_reason=FinishReason.STOP, stop_reason=last)
        if self.num_tokens >= max_model_len:
            return Stop(finish_reason=FinishReason.LENGTH)
        if self._max_output_tokens is not None and num_output_tokens >= self._max_output_tokens:
            return Stop(finish_reason=FinishReason.LENGTH)
        return None

    def to_new_request(self, block_ids: list[int]) -> NewRequest:
        """Describe the request to workers that do not hold it."""
        stop_token_ids = {*self.core_request.eos_token_ids, *self._stop_token_ids}
        return NewRequest(
            request_id=self.request_id,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=block_ids,
            sampling_params=self.core_request.sampling_params,
            seed=self.core_request.seed,
            stop_token_ids=tuple(sorted(stop_token_ids)),
        )
