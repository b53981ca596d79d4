"""From what clients send to the tokens of prompts, without holding up the event loop.

Called by: routes.py. What takes long is done in a thread, where it lets go of the interpreter's lock, or holds it for
moments only: one client's long prompt is no reason for a pause of all the others' streams.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...engine.errors import InvalidRequestError
from ...engine.input_processor import MAX_CHARACTERS_PER_TOKEN, prompt_too_long
from ...workers.sampling_params import SamplingParams
from .protocol import CompletionRequest, SamplingFields
from .service import Service
from .validation import truncate_prompt

T = TypeVar("T")

THREAD_SIZE = 1 << 14
"""From so many characters, bytes or tokens on, work is done in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPrompt:
    """A prompt that has its place in the context. echo: its text, when the client wants it back; else None."""

    token_ids: list[int]
    echo: str | None = None


async def beside(size: int, work: Callable[[], T]) -> T:
    """Run `work`, in a thread when it is long. size: of what it works on."""
    return work() if size < THREAD_SIZE else await asyncio.to_thread(work)


def encode(service: Service, text: str, *, add_special_tokens: bool, field: str = "prompt") -> list[int]:
    """Text to tokens. Raises InvalidRequestError for what can never fit, which would take seconds."""
    if len(text) > service.max_model_len * MAX_CHARACTERS_PER_TOKEN:
        raise InvalidRequestError(f"the prompt of {len(text)} characters is too long", field=field)
    return service.codec.encode(text, add_special_tokens=add_special_tokens)


def show(service: Service, ids: Sequence[int]) -> str:
    """Tokens to text, special ones included."""
    return service.codec.decode(ids, skip_special_tokens=False)


def fit(service: Service, ids: list[int], request: SamplingFields, params: SamplingParams) -> list[int]:
    """Cut a prompt as the client says. Raises InvalidRequestError when it is too long then."""
    ids = truncate_prompt(ids, request, params, max_model_len=service.max_model_len)
    if len(ids) >= service.max_model_len:
        raise prompt_too_long(f"{len(ids)} tokens", service.max_model_len)
    return ids


async def fit_prompts(
    service: Service, body: CompletionRequest, params: SamplingParams, prompts: Sequence[str | list[int]]
) -> list[FittedPrompt]:
    """Turn all prompts of a completion into tokens. The first one that is too long ends it."""

    def work() -> list[FittedPrompt]:
        fitted = []
        for prompt in prompts:
            if isinstance(prompt, str):
                ids = encode(service, prompt, add_special_tokens=body.add_special_tokens is not False)
            else:
                ids = prompt
            ids = fit(service, ids, body, params)
            echo = None
            if body.echo:
                is_whole = isinstance(prompt, str) and body.truncate_prompt_tokens is None
                echo = prompt if is_whole and isinstance(prompt, str) else service.codec.decode(ids)
            fitted.append(FittedPrompt(token_ids=ids, echo=echo))
        return fitted

    return await beside(sum(map(len, prompts)), work)
