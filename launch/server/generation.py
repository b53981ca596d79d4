"""Running the prompts of one HTTP request: pieces of text as they come, counted and timed.

Called by: routes.py. Several prompts of one request run side by side, and their pieces come out in the order
in which they arrive, each with the index of its prompt. Closing an iterator early aborts what still runs.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from ...engine.errors import RequestAbortedError
from ...engine.messages import FinishReason
from ...engine.outputs import RequestOutput
from ...workers.sampling_params import SamplingParams
from .protocol import PromptTokensDetails, Usage
from .service import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt of a request. index: its choice in the answer."""

    index: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one output of the engine adds to one choice. finish_reason: "stop" or "length" in the last one."""

    index: int
    text: str
    num_tokens: int
    finish_reason: str | None
    stop_reason: int | str | None
    num_cached_tokens: int


@dataclass(slots=True)
class UsageCounter:
    """Tokens of one HTTP request, as far as they have come. Owner: its handler."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)

    def add(self, piece: Piece) -> None:
        """Count one piece."""
        self.num_output_tokens += piece.num_tokens
        self.cached_tokens[piece.index] = max(self.cached_tokens.get(piece.index, 0), piece.num_cached_tokens)

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
    tasks = [asyncio.create_task(_feed(service, job, queue)) for job in jobs]
    try:
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
    started_at = last_at = time.monotonic()
    is_first = True
    outputs = service.engine.generate(job.prompt_token_ids, job.params, job.request_id)
    try:
        async for output in outputs:
            piece = _to_piece(job.index, output)
            now = time.monotonic()
            if piece.num_tokens:
                (metrics.first_token if is_first else metrics.between_tokens).observe(now - last_at)
                metrics.generation_tokens.inc(piece.num_tokens)
                if is_first:
                    metrics.prompt_tokens.inc(len(job.prompt_token_ids))
                is_first, last_at = False, now
            if piece.finish_reason is not None:
                metrics.whole_request.observe(now - started_at)
            yield piece
            if piece.finish_reason is not None:
                return
    finally:
        if isinstance(outputs, AsyncGenerator):
            await outputs.aclose()
    raise RequestAbortedError("the engine ended the request before it was complete")


def _to_piece(index: int, output: RequestOutput) -> Piece:
    (completion,) = output.outputs
    # A request that is aborted or lost has no last output: its iterator raises.
    assert completion.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH)
    return Piece(
        index=index,
        text=completion.text,
        num_tokens=len(completion.token_ids),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
    )
