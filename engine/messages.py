"""What crosses the border between front ends and engine cores. msgspec values, msgpack on the wire, no pickle.

Called by: core_client.py and cluster/dp_client.py in the front end, core_loop.py in the engine core.
Instants are `time.monotonic()` of the host: one clock for all its processes.
"""

from enum import StrEnum

import msgspec

from ..workers.messages import LogprobTable
from ..workers.sampling_params import SamplingParams
from .prefix_log import PrefixDelta


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens, or the context is full."""
    ABORT = "abort"
    """The client left, or the server stops."""
    ERROR = "error"
    """See `EngineCoreOutput.error`."""
    TIMEOUT = "timeout"
    """The request's deadline has passed."""


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """One request for one engine core, checked and tokenised by the front end.

    request_id:       never used a second time for another request, by any front end
    client_index, incarnation: which front end gets the output; of one that is gone nothing more is taken
    sampling_params:  with max_tokens filled in
    eos_token_ids:    the model's end-of-sequence tokens
    seed:             of the sampling noise; always set
    attempt:          0 at first; one more for each replica that was lost with the request. Outputs of an
                      older attempt are dropped
    output_token_ids: tokens made by earlier attempts; positions, min and max tokens and stops go on from there
    arrived_at:       when the front end got it
    priority:         requests of a smaller number come first
    cache_salt:       cached prefixes are shared only with requests of the same salt
    group_id:         shared by the samples of one prompt: they wait for the first one's prompt, and use its blocks
    deadline_at:      the request ends with TIMEOUT then; None: never
    block_hashes:     of the prompt's full blocks, for the engine core's block size; empty: it hashes them itself
    number:           of this choice among those of its front end, rising; 0: nobody counts
    num_expected_cached_tokens: prompt tokens that the front end expects in the prefix cache
    routed_dp_rank:   the replica that the client asks for; None: any
    session_id:       requests of one session go to one replica where sessions are sticky
    vocab_limit:      ids from here on are padding of the model's vocabulary, and never sampled; None: all are real
    caller_id:        what the caller knows the request by, for outputs, logs and look-ups; None: request_id
    """

    request_id: str
    client_index: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    seed: int
    arrived_at: float
    attempt: int = 0
    output_token_ids: list[int] = []
    priority: int = 0
    cache_salt: str | None = None
    group_id: str | None = None
    deadline_at: float | None = None
    block_hashes: list[bytes] = []
    number: int = 0
    num_expected_cached_tokens: int = 0
    routed_dp_rank: int | None = None
    session_id: str | None = None
    vocab_limit: int | None = None
    caller_id: str | None = None
    incarnation: int = 0

    @property
    def known_as(self) -> str:
        """The id that the caller knows."""
        return self.request_id if self.caller_id is None else self.caller_id


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Forget these requests. Unknown ids are ignored; nothing is answered."""

    request_ids: list[str]


class ClientHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A front end's first message: where its outputs go.

    incarnation: one more each time this front end is restarted; requests of an older one are aborted.
    """

    client_index: int
    incarnation: int
    output_address: str


class ResetPrefixCache(msgspec.Struct, frozen=True, kw_only=True, tag="reset_prefix_cache"):
    """Forget all cached prefixes. Answered by a `PrefixCacheReset` of the same call_id."""

    client_index: int
    call_id: int


class FollowPrefixes(msgspec.Struct, frozen=True, kw_only=True, tag="follow_prefixes"):
    """Say what the prefix cache holds, and every `PrefixDelta` from now on; again: after a gap."""

    client_index: int


ClientMessage = EngineCoreRequest | AbortRequests | ClientHello | ResetPrefixCache | FollowPrefixes
"""All that a front end may send to an engine core."""


class EngineCoreOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What there is to say of one request after a step: its new tokens, its end, or both.

    stop_reason:       the stop token that ended it, when it was one of the client's
    num_cached_tokens: prompt tokens found in the prefix cache at first admission; sent with the first output
    error:             one sentence, with finish_reason ERROR
    is_poisonous:      the request killed two replicas in a row, and is not tried again
    is_invalid:        the request itself is at fault; otherwise an error is that of the replica, and the request
                       may be tried again. error_field: which of its fields, when one can be named
    retry_after_s:     set when the request was refused because the queue is full
    logprobs:          of the new tokens, one position for each, when the request asked
    prompt_logprobs:   of all prompt tokens but the first, with the first token of a request that asked; once in all
                       its attempts
    """

    request_id: str
    attempt: int = 0
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    is_invalid: bool = False
    error_field: str | None = None
    is_poisonous: bool = False
    retry_after_s: float | None = None
    logprobs: LogprobTable | None = None
    prompt_logprobs: LogprobTable | None = None


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step made: for one front end, or for all of them.

    request_ids, token_ids: parallel: the requests that got one token, and of which there is nothing else to say.
                            Nearly all, so they cost a step two entries of lists, and no object. All are in their first
                            attempt (0) and go on
    others:                 all that is to be said of other requests

    No request stands in both, so the two may be read in any order.
    """

    request_ids: list[str] = []
    token_ids: list[int] = []
    others: list[EngineCoreOutput] = []


class PrefixCacheReset(msgspec.Struct, frozen=True, kw_only=True):
    """is_reset: False when requests hold blocks: nothing was forgotten then."""

    call_id: int
    is_reset: bool


class EngineCoreOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All outputs of one step for one front end, or the answer to one of its calls, or what it follows."""

    dp_rank: int
    epoch: int
    outputs: StepOutputs = StepOutputs()
    reset: PrefixCacheReset | None = None
    prefix_delta: PrefixDelta | None = None


class AdmittedMark(msgspec.Struct, frozen=True, kw_only=True):
    """The last request of one front end that an engine core has taken: `EngineCoreRequest.number`."""

    client_index: int
    incarnation: int
    number: int


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """One engine core's load, as it stands after a step. Sent to the coordinator when it changes.

    sequence:              one more with each report of this epoch
    kv_usage:              part of the KV blocks that running requests hold, evictable cached ones left out. [0, 1]
    num_free_blocks:       free blocks, evictable cached ones included
    num_free_tokens:       of one request that would take all of them: fewer than num_free_blocks * block size when each
                           column of a table takes several blocks
    num_prefill_tokens:    tokens of waiting and running requests that are still to be prefilled
    num_running_tokens:    tokens of running requests that are in the KV cache
    admitted:              by front end, the last request that these numbers count; taken together with them
    busy_s:                time with a step in flight, in seconds; a counter like those below
    num_context_tokens_total: tokens in the KV cache for the requests of a step, when it began; summed over the steps
    prefix_*_tokens, num_preemptions, num_steps, num_*_tokens_total: counters since the start of this epoch; those of
                           steps count the steps that are back, as busy_s does
    """

    dp_rank: int
    epoch: int
    sequence: int
    reported_at: float
    num_waiting: int
    num_running: int
    num_prefill_tokens: int
    kv_usage: float
    num_free_blocks: int
    num_free_tokens: int
    num_blocks: int
    num_running_tokens: int = 0
    admitted: list[AdmittedMark] = []
    busy_s: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_prefill_tokens_total: int = 0
    num_context_tokens_total: int = 0
    num_output_tokens_total: int = 0
