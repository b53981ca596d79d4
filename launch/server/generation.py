"""Running the prompts of one HTTP request: pieces of text as they come, counted and timed.

Called by: routes.py. Several prompts of one request run side by side, and their pieces come out in the order
in which they arrive, each with the index of its choice. Closing an iterator early aborts what still runs.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from ...engine.errors import RequestAbortedError
from ...engine.input_processor import DEFAULT_OPTIONS, RequestOptions
from ...engine.logprobs import PositionLogprobs
from ...engine.messages import FinishReason
from ...engine.outputs import CompletionOutput, RequestOutput
from ...workers.sampling_params import SamplingParams
from .protocol import PromptTokensDetails, Usage
from .service import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt of a request.

    index:      of its first choice in the answer; its params.n samples follow each other
    is_scoring: nothing is to be written: what the model makes beyond the prompt is left out
    """

    index: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    options: RequestOptions = DEFAULT_OPTIONS
    is_scoring: bool = False

    @property
    def choices(self) -> range:
        """The choices that this prompt makes."""
        return range(self.index, self.index + self.params.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one output of the engine adds to one choice.

    index:         of the choice; prompt_index: of the first choice of its prompt
    num_unseen_tokens: of samples that are not shown, since others are better; told once, with the first that is
    finish_reason: "stop" or "length" in the last one
    logprobs:        one entry for each token; prompt_logprobs: one for each prompt token, as soon as they are known;
                     None when they were not asked for
    """

    index: int
    prompt_index: int
    text: str
    num_tokens: int
    finish_reason: str | None
    stop_reason: int | str | None
    num_cached_tokens: int
    num_unseen_tokens: int = 0
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None


@dataclass(slots=True)
class UsageCounter:
    """Tokens of one HTTP request, as far as they have come. Owner: its handler."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)

    def add(self, piece: Piece) -> None:
        """Count one piece."""
        self.num_output_tokens += piece.num_tokens + piece.num_unseen_tokens
        known = self.cached_tokens.get(piece.prompt_index, 0)
        self.cached_tokens[piece.prompt_index] = max(known, piece.num_cached_tokens)

    def usage(self) -> Usage:
        """Give the numbers as the API shows them."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=self.num_prompt_tokens + self.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self.cached_tokens.values())),
        )


async def run_jobs(service: Service, jobs: Sequence[Job]) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of all jobs as they come. The first error ends all. Closing it early aborts all."""
    if len(jobs) == 1:
        async with aclosing(_run_job(service, jobs[0])) as pieces:
            async for piece in pieces:
                yield piece
        return
    # As many pieces as jobs: a slow client holds the jobs back instead of filling memory.
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(maxsize=len(jobs))
    tasks: list[asyncio.Task[None]] = []
    try:
        for job in jobs:
            tasks.append(asyncio.create_task(_feed(service, job, queue)))
            # Each begins with some work, and others want their turn between them.
            await asyncio.sleep(0)
        num_running = len(tasks)
        while num_running:
            match await queue.get():
                case None:
                    num_running -= 1
                case Exception() as error:
                    raise error
                case Piece() as piece:
                    yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(service: Service, job: Job, queue: "asyncio.Queue[Piece | Exception | None]") -> None:
    try:
        async with aclosing(_run_job(service, job)) as pieces:
            async for piece in pieces:
                await queue.put(piece)
        await queue.put(None)
    # Carried over to the task that reads the queue, which raises it.
    except Exception as error:
        await queue.put(error)


async def _run_job(service: Service, job: Job) -> AsyncGenerator[Piece, None]:
    metrics = service.metrics
    started_at = time.monotonic()
    last_at: dict[int, float] = {}
    is_prompt_counted = False
    outputs = service.engine.generate(job.prompt_token_ids, job.params, job.request_id, options=job.options)
    try:
        async for output in outputs:
            now = time.monotonic()
            num_unseen = _num_unseen_tokens(job, output)
            for completion in output.outputs:
                piece = _to_piece(job, completion, output, num_unseen)
                num_unseen = 0
                if not is_prompt_counted:
                    metrics.prompt_tokens.inc(len(job.prompt_token_ids))
                    is_prompt_counted = True
                if piece.num_tokens:
                    if piece.index in last_at:
                        metrics.between_tokens.observe(now - last_at[piece.index])
                    else:
                        metrics.first_token.observe(now - started_at)
                    metrics.generation_tokens.inc(piece.num_tokens + piece.num_unseen_tokens)
                    last_at[piece.index] = now
                yield piece
            if output.finished:
                metrics.whole_request.observe(now - started_at)
                return
    finally:
        if isinstance(outputs, AsyncGenerator):
            await outputs.aclose()
    raise RequestAbortedError("the engine ended the request before it was complete")


def _num_unseen_tokens(job: Job, output: RequestOutput) -> int:
    """Tokens of samples that were not good enough: they were made, and are paid for as OpenAI's are."""
    if job.params.num_samples == job.params.n or not output.finished:
        return 0
    return output.num_output_tokens - sum(len(completion.token_ids) for completion in output.outputs)


def _to_piece(job: Job, completion: CompletionOutput, output: RequestOutput, num_unseen_tokens: int) -> Piece:
    # A request that is aborted or lost has no last output: its iterator raises.
    assert completion.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH)
    piece = Piece(
        index=job.index + completion.index,
        prompt_index=job.index,
        text=completion.text,
        num_tokens=len(completion.token_ids),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        num_unseen_tokens=num_unseen_tokens,
        logprobs=completion.logprobs,
        prompt_logprobs=output.prompt_logprobs,
    )
    if not job.is_scoring:
        return piece
    return replace(
        piece,
        text="",
        num_tokens=0,
        num_unseen_tokens=0,
        finish_reason=piece.finish_reason and FinishReason.LENGTH,
        stop_reason=None,
        logprobs=None if piece.logprobs is None else [],
    )
