"""n > 1 and best_of: one prompt, several requests for the engine, one answer.

Called by: OutputProcessor, in the front end. The engine knows nothing of it but `group_id`: siblings wait until the
first one's prompt is computed, and then share its blocks through the prefix cache.

best_of: which samples are the best is known when all have ended, so nothing is given before. They are ranked by the
mean log-probability of their tokens, as OpenAI's completions are: a sum would prefer the shorter ones.
"""

import math
from dataclasses import replace

import msgspec

from ..workers.sampling_params import SamplingParams
from .input_processor import ProcessedRequest
from .messages import EngineCoreRequest
from .outputs import CompletionOutput, OutputKind, RequestOutput

_SEEDS = 1 << 64


def fan_out(processed: ProcessedRequest) -> list[EngineCoreRequest]:
    """Make one request for each sample, number i with seed + i.

    They differ in nothing else, but that the first one alone tells of the prompt. To the caller they are one request.
    """
    request = processed.core_request
    asked = request.sampling_params
    num_samples = asked.num_samples
    if num_samples == 1:
        return [request]
    logprobs = asked.logprobs
    if num_samples > asked.n and logprobs is None:
        # Those of the sampled tokens alone: what the samples are ranked by.
        logprobs = 0
    params = msgspec.structs.replace(asked, n=1, best_of=None, logprobs=logprobs)
    silent = msgspec.structs.replace(params, prompt_logprobs=None)
    return [
        msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}#{index}",
            sampling_params=params if index == 0 else silent,
            seed=_wrap(request.seed + index),
            group_id=request.request_id,
            caller_id=request.known_as,
        )
        for index in range(num_samples)
    ]


class SampleGroup:
    """The samples of one prompt, as their outputs come. Owner: OutputProcessor.

    request_id, child_ids: as the engine knows them; child_ids by index
    params:    as the request has them
    kind:      of the outputs that are given
    """

    def __init__(
        self, request_id: str, child_ids: list[str], params: SamplingParams, kind: OutputKind
    ) -> None:
        self.request_id = request_id
        self.child_ids = child_ids
        self._is_ranked = params.num_samples > params.n
        self._num_shown = params.n
        self._shows_logprobs = params.logprobs is not None
        self.child_kind = OutputKind.CUMULATIVE if self._is_ranked else kind
        """Of the outputs that `combine` takes."""
        self._latest: dict[int, RequestOutput] = {}

    def combine(self, index: int, output: RequestOutput) -> RequestOutput:
        """Turn an output of sample number `index` into one of the whole request.

        The prompt counts once, and so do its cached tokens: those of the first sample, which computed the others.
        """
        (completion,) = output.outputs
        self._latest[index] = replace(output, outputs=[replace(completion, index=index)])
        first = self._latest[min(self._latest)]
        is_finished = len(self._latest) == len(self.child_ids) and all(
            latest.finished for latest in self._latest.values()
        )
        if self._is_ranked:
            shown = self._best() if is_finished else []
        elif self.child_kind is OutputKind.DELTA:
            shown = self._latest[index].outputs
        else:
            shown = [one for number in sorted(self._latest) for one in self._latest[number].outputs]
        times = [latest.times.first_token_at for latest in self._latest.values()]
        known = [at for at in times if at is not None]
        return replace(
            output,
            outputs=shown,
            finished=is_finished,
            num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=first.prompt_logprobs,
            num_output_tokens=sum(latest.num_output_tokens for latest in self._latest.values()),
            times=replace(
                output.times,
                first_token_at=min(known, default=None),
                finished_at=output.times.finished_at if is_finished else None,
            ),
        )

    def _best(self) -> list[CompletionOutput]:
        """Return the best samples, best first, numbered anew; the earlier one of equals."""
        samples = [sample for _, latest in sorted(self._latest.items()) for sample in latest.outputs]
        samples.sort(key=_mean_logprob, reverse=True)
        return [
            replace(
                sample,
                index=rank,
                logprobs=sample.logprobs if self._shows_logprobs else None,
                cumulative_logprob=sample.cumulative_logprob if self._shows_logprobs else None,
            )
            for rank, sample in enumerate(samples[: self._num_shown])
        ]


def _mean_logprob(sample: CompletionOutput) -> float:
    if sample.cumulative_logprob is None or not sample.token_ids:
        return -math.inf
    return sample.cumulative_logprob / len(sample.token_ids)


def _wrap(seed: int) -> int:
    """Bring a seed back into the range of 64 bits."""
    return (seed + _SEEDS // 2) % _SEEDS - _SEEDS // 2
