"""From the pieces of an answer to what the client gets: whole, or as a stream of events.

Called by: routes.py. One answer has one header and one or more choices; each choice is written by its own writer,
which knows how far its text has come.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from ...engine.logprobs import PositionLogprobs
from .generation import Job, Piece, UsageCounter
from .logprobs import CompletionLogprobsWriter, chat_logprobs, join, prompt_logprobs
from .protocol import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    Delta,
    PromptLogprobs,
    Usage,
)
from .service import TextCodec
from .sse import event


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What all chunks of one answer share.

    created:     seconds since 1970, as the API wants it
    fingerprint: version of the weights that served when the request came
    """

    id: str
    created: int
    model: str
    fingerprint: str | None


@dataclass(slots=True, kw_only=True)
class Answer:
    """One whole choice. last: its last piece."""

    text: str
    last: Piece
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None


async def collect(pieces: AsyncIterator[Piece], counter: UsageCounter) -> list[Answer]:
    """Read all pieces. Returns the choices in the order of their index."""
    texts: dict[int, list[str]] = {}
    answers: dict[int, Answer] = {}
    prompts: dict[int, list[PositionLogprobs | None]] = {}
    async for piece in pieces:
        counter.add(piece)
        texts.setdefault(piece.index, []).append(piece.text)
        answer = answers.setdefault(piece.index, Answer(text="", last=piece))
        answer.last = piece
        answer.logprobs += piece.logprobs or []
        if piece.prompt_logprobs is not None:
            prompts[piece.prompt_index] = piece.prompt_logprobs
    for index, answer in answers.items():
        answer.text = "".join(texts[index])
        answer.prompt_logprobs = prompts.get(answer.last.prompt_index)
    return [answers[index] for index in sorted(answers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionForm:
    """How the choices of one prompt are written.

    echo:                 text of the prompt, put in front; None: it is not
    shows_prompt_logprobs: as a field of its own
    """

    job: Job
    codec: TextCodec
    echo: str | None = None
    shows_prompt_logprobs: bool = False

    @property
    def has_logprobs(self) -> bool:
        """True when every token is told of."""
        return self.job.params.logprobs is not None

    @property
    def waits_for_prompt(self) -> bool:
        """True when the first thing to be written is what is known of the prompt."""
        return self.echo is not None and self.has_logprobs

    def writer(self) -> "CompletionWriter":
        """Begin one choice."""
        return CompletionWriter(self)


class CompletionWriter:
    """Text and log-probabilities of one choice of /v1/completions, piece by piece."""

    def __init__(self, form: CompletionForm) -> None:
        self._form = form
        self._logprobs = CompletionLogprobsWriter(
            offset=0 if form.waits_for_prompt else len(form.echo or ""),
            skips_special_tokens=form.job.params.skip_special_tokens,
        )

    def write_echo(self, index: int, positions: Sequence[PositionLogprobs | None] | None) -> CompletionChoice:
        """Write the prompt. positions: what is known of it, when that is wanted."""
        logprobs, echo = None, self._form.echo or ""
        if positions is not None and self._form.waits_for_prompt:
            first = self._form.job.prompt_token_ids[0]
            logprobs = self._logprobs.write_prompt(positions, first, self._form.codec, echo=echo)
        return CompletionChoice(index=index, text=echo, logprobs=logprobs)

    def write(self, positions: Sequence[PositionLogprobs] | None) -> CompletionLogprobs | None:
        """Write what is known of the next tokens."""
        if positions is None or not self._form.has_logprobs:
            return None
        return self._logprobs.write(positions)


def completion_choices(forms: Sequence[CompletionForm], answers: Sequence[Answer]) -> list[CompletionChoice]:
    """Write whole choices. forms, answers: one for each, in order."""
    choices = []
    for index, (form, answer) in enumerate(zip(forms, answers, strict=True)):
        writer = form.writer()
        echoed = writer.write_echo(index, answer.prompt_logprobs)
        logprobs = writer.write(answer.logprobs)
        if echoed.logprobs is not None and logprobs is not None:
            logprobs = join(echoed.logprobs, logprobs)
        shown: PromptLogprobs | UnsetType = UNSET
        if form.shows_prompt_logprobs and answer.prompt_logprobs is not None:
            shown = prompt_logprobs(answer.prompt_logprobs)
        choices.append(
            CompletionChoice(
                index=index,
                text=echoed.text + answer.text,
                logprobs=logprobs,
                finish_reason=answer.last.finish_reason,
                stop_reason=answer.last.stop_reason,
                prompt_logprobs=shown,
            )
        )
    return choices


def chat_choices(answers: Sequence[Answer], *, num_top: int | None) -> list[ChatChoice]:
    """Write whole choices. num_top: likeliest tokens at each place; None: no log-probabilities."""
    choices = []
    for index, answer in enumerate(answers):
        assert answer.last.finish_reason is not None
        choices.append(
            ChatChoice(
                index=index,
                message=AnswerMessage(content=answer.text),
                logprobs=None if num_top is None else chat_logprobs(answer.logprobs, num_top),
                finish_reason=answer.last.finish_reason,
                stop_reason=answer.last.stop_reason,
            )
        )
    return choices


async def completion_events(
    header: Header,
    pieces: AsyncGenerator[Piece, None],
    counter: UsageCounter,
    *,
    forms: Sequence[CompletionForm],
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Write choices as they come. forms: one for each. Owns `pieces` and closes it."""
    # null in all chunks but the last when usage was asked for, absent when it was not.
    no_usage: UnsetType | None = None if include_usage else UNSET
    writers = [form.writer() for form in forms]
    has_begun = [not form.waits_for_prompt for form in forms]
    prompts: dict[int, list[PositionLogprobs | None]] = {}
    waiting: list[Piece] = []

    def chunk(choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        return event(
            CompletionResponse(
                id=header.id,
                created=header.created,
                model=header.model,
                system_fingerprint=header.fingerprint,
                choices=choices,
                usage=usage,
            )
        )

    try:
        plain = [
            writer.write_echo(index, None)
            for index, (writer, form) in enumerate(zip(writers, forms, strict=True))
            if not form.waits_for_prompt
        ]
        if any(choice.text for choice in plain):
            yield chunk(plain, no_usage)
        async for news in pieces:
            counter.add(news)
            if news.prompt_logprobs is not None:
                prompts[news.prompt_index] = news.prompt_logprobs
            waiting.append(news)
            arrived, waiting = waiting, []
            for piece in arrived:
                if not has_begun[piece.index]:
                    if piece.prompt_index not in prompts:
                        # Another sample of the prompt will tell of it; until then this one waits.
                        waiting.append(piece)
                        continue
                    has_begun[piece.index] = True
                    echoed = writers[piece.index].write_echo(piece.index, prompts[piece.prompt_index])
                    yield chunk([echoed], no_usage)
                if not (piece.text or piece.finish_reason or piece.logprobs):
                    continue
                choice = CompletionChoice(
                    index=piece.index,
                    text=piece.text,
                    logprobs=writers[piece.index].write(piece.logprobs),
                    finish_reason=piece.finish_reason,
                    stop_reason=piece.stop_reason,
                )
                yield chunk([choice], no_usage)
        if include_usage:
            yield chunk([], counter.usage())
    finally:
        await pieces.aclose()


async def chat_events(
    header: Header,
    pieces: AsyncGenerator[Piece, None],
    counter: UsageCounter,
    *,
    num_choices: int,
    num_top: int | None,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Write messages as they come. num_top: as of `chat_choices`. Owns `pieces` and closes it."""
    no_usage: UnsetType | None = None if include_usage else UNSET

    def chunk(choices: list[ChatChunkChoice], usage: Usage | UnsetType | None = no_usage) -> bytes:
        return event(
            ChatChunk(
                id=header.id,
                created=header.created,
                model=header.model,
                system_fingerprint=header.fingerprint,
                choices=choices,
                usage=usage,
            )
        )

    try:
        for index in range(num_choices):
            yield chunk([ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))])
        async for piece in pieces:
            counter.add(piece)
            if piece.text or piece.logprobs:
                logprobs = None
                if num_top is not None and piece.logprobs is not None:
                    logprobs = chat_logprobs(piece.logprobs, num_top)
                delta = Delta(content=piece.text)
                yield chunk([ChatChunkChoice(index=piece.index, delta=delta, logprobs=logprobs)])
            if piece.finish_reason is not None:
                yield chunk(
                    [ChatChunkChoice(index=piece.index, delta=Delta(), finish_reason=piece.finish_reason)]
                )
        if include_usage:
            yield chunk([], counter.usage())
    finally:
        await pieces.aclose()
