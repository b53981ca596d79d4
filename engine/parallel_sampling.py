"""n > 1: one prompt, n requests for the engine, one answer.

Called by: OutputProcessor, in the front end. The engine knows nothing of it but `group_id`: siblings wait until the
first one's prompt is computed, and then share its blocks through the prefix cache.
"""

from dataclasses import replace

import msgspec

from .input_processor import ProcessedRequest
from .messages import EngineCoreRequest
from .outputs import CompletionOutput, RequestOutput

_SEEDS = 1 << 64


def fan_out(processed: ProcessedRequest) -> list[EngineCoreRequest]:
    """Make one request for each sample, number i with seed + i.

    They differ in nothing else, but that the first one alone tells of the prompt.
    """
    request = processed.core_request
    num_samples = request.sampling_params.n
    if num_samples == 1:
        return [request]
    params = msgspec.structs.replace(request.sampling_params, n=1)
    silent = msgspec.structs.replace(params, prompt_logprobs=None)
    return [
        msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}#{index}",
            sampling_params=params if index == 0 else silent,
            seed=_wrap(request.seed + index),
            group_id=request.request_id,
        )
        for index in range(num_samples)
    ]


class SampleGroup:
    """The samples of one prompt, as their outputs come. Owner: OutputProcessor.

    child_ids: by index; is_delta: outputs hold what is new only
    """

    def __init__(self, request_id: str, child_ids: list[str], *, is_delta: bool) -> None:
        self.request_id = request_id
        self.child_ids = child_ids
        self._is_delta = is_delta
        self._latest: dict[int, RequestOutput] = {}

    def combine(self, index: int, output: RequestOutput) -> RequestOutput:
        """Turn an output of sample number `index` into one of the whole request.

        The prompt counts once, and so do its cached tokens: those of the first sample, which computed the others.
        """
        (completion,) = output.outputs
        self._latest[index] = replace(output, outputs=[replace(completion, index=index)])
        first = self._latest[min(self._latest)]
        shown: list[CompletionOutput] = []
        for number in [index] if self._is_delta else sorted(self._latest):
            shown += self._latest[number].outputs
        is_finished = len(self._latest) == len(self.child_ids) and all(
            latest.finished for latest in self._latest.values()
        )
        times = [latest.times.first_token_at for latest in self._latest.values()]
        known = [at for at in times if at is not None]
        return replace(
            output,
            request_id=self.request_id,
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


def _wrap(seed: int) -> int:
    """Bring a seed back into the range of 64 bits."""
    return (seed + _SEEDS // 2) % _SEEDS - _SEEDS // 2
