"""What a user gets back: RequestOutput and CompletionOutput. Frozen values.

Called by: OutputProcessor builds them; `LLM`, `AsyncLLM` and the API server hand them on.
Instants are `time.monotonic()` of this host.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from .logprobs import PositionLogprobs
from .messages import FinishReason


class OutputKind(StrEnum):
    """What each output of a stream holds."""

    DELTA = "delta"
    """What is new since the last one."""
    CUMULATIVE = "cumulative"
    """Everything so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """When what happened. first_token_at, finished_at: None until then."""

    arrived_at: float
    first_token_at: float | None = None
    finished_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One output of a request, or what is new of it.

    token_ids:     all tokens, the one that ended the output included
    text:          without the text of end tokens and stop strings, unless they were asked for
    finish_reason: None while it runs
    stop_reason:   the client's stop token or stop string that ended it
    index:         which of the n samples
    logprobs:      one entry for each of token_ids; None when the request did not ask
    cumulative_logprob: sum over all tokens so far, also where token_ids are the new ones only
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    index: int = 0
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One request and its outputs, in the order of their index. A delta holds those that have news.

    prompt:            its text; None when it came as tokens
    num_cached_tokens: prompt tokens that the prefix cache gave
    num_output_tokens: of all samples, also when `outputs` holds what is new only
    prompt_logprobs:   one entry for each prompt token, None for the first; None as a whole when the request did not
                       ask, and until its first token
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    num_output_tokens: int
    times: RequestTimes
    prompt_logprobs: list[PositionLogprobs | None] | None = None


def merge_deltas(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Make one output of two that follow each other, both of kind DELTA. Samples are merged by their index."""
    merged = {completion.index: completion for completion in earlier.outputs}
    for second in later.outputs:
        first = merged.get(second.index)
        if first is not None:
            logprobs = second.logprobs
            if logprobs is not None and first.logprobs is not None:
                logprobs = first.logprobs + logprobs
            second = replace(
                second,
                text=first.text + second.text,
                token_ids=first.token_ids + second.token_ids,
                logprobs=logprobs,
            )
        merged[second.index] = second
    return replace(later, outputs=[merged[index] for index in sorted(merged)])
