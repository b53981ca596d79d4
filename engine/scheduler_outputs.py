"""What the scheduler says: outputs of requests, the masks of their grammars, and what workers must hold. Pure.

Called by: Scheduler.
"""

import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from ..workers.messages import GrammarMasks, ModelRunnerOutput, RowState
from .kv_cache_manager import KVCacheManager
from .messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from .request import Request, RequestStatus, Stop
from .step_plan import StepPlan

RETRY_AFTER_S = 1.0
"""What a client is told to wait when the queue is full: about the time of a few hundred decode steps' worth
of finished requests; no finer estimate is worth its cost."""


def make_output(
    request: Request,
    *,
    new_token_ids: list[int] | None = None,
    stop: Stop | None = None,
    finish_reason: FinishReason | None = None,
    sampled: ModelRunnerOutput | None = None,
) -> EngineCoreOutput:
    """Say what a request got, and whether it ended: by a `stop`, or otherwise with `finish_reason`.

    sampled: of the step that made the new tokens, with their log-probabilities
    """
    logprobs = sampled.logprobs.get(request.request_id) if sampled and sampled.logprobs else None
    if request.has_begun and stop is None and finish_reason is None:
        return EngineCoreOutput(
            request_id=request.request_id,
            attempt=request.attempt,
            new_token_ids=new_token_ids or [],
            logprobs=logprobs,
        )
    prompt_logprobs = sampled.prompt_logprobs.get(request.request_id) if sampled else None
    num_cached_tokens = 0
    if not request.has_begun:
        request.begin_output()
        num_cached_tokens = request.num_cached_tokens or 0
    return EngineCoreOutput(
        request_id=request.request_id,
        attempt=request.attempt,
        new_token_ids=new_token_ids or [],
        finish_reason=stop.finish_reason if stop else finish_reason,
        stop_reason=stop.stop_reason if stop else None,
        num_cached_tokens=num_cached_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def refuse(
    request: EngineCoreRequest,
    error: str,
    *,
    is_full: bool = False,
    is_invalid: bool = True,
    field: str | None = None,
) -> EngineCoreOutput:
    """End a request with an error. is_full: it may come back; is_invalid: the client's fault, in `field`."""
    return EngineCoreOutput(
        request_id=request.request_id,
        attempt=request.attempt,
        finish_reason=FinishReason.ERROR,
        error=error,
        is_invalid=is_invalid and not is_full,
        error_field=None if is_full else field,
        retry_after_s=RETRY_AFTER_S if is_full else None,
    )


def describe_rows(requests: Iterable[Request], plan: StepPlan, kv: KVCacheManager) -> dict[str, RowState]:
    """Say what the workers must hold of the requests of a step before it."""
    is_sampling = {request.request_id for request in plan.sampling}
    return {
        request.request_id: RowState(
            # The step's own sample is a placeholder already.
            num_tokens=request.num_tokens + request.num_placeholders - (request.request_id in is_sampling),
            num_known=request.num_tokens,
            known_digest=zlib.crc32(np.array(request.token_ids, dtype="<i4").tobytes()),
            block_ids=kv.get_block_ids(request.request_id),
        )
        for request in requests
        if request.request_id in plan.num_scheduled_tokens
    }


def fill_grammar_masks(step: int, sampling: Sequence[Request], vocab_size: int) -> GrammarMasks:
    """Ask the matchers of a step what may come next, all steps before it being known.

    Requests that have ended meanwhile are left out: their matchers may stand anywhere.
    """
    constrained = [
        request
        for request in sampling
        if request.matcher is not None and request.status is not RequestStatus.FINISHED
    ]
    words = np.zeros((len(constrained), -(-vocab_size // 32)), dtype=np.uint32)
    for row, request in zip(words, constrained, strict=True):
        assert request.matcher is not None
        request.matcher.fill(row)
    return GrammarMasks(
        step=step, request_ids=[request.request_id for request in constrained], bits=words.tobytes()
    )
