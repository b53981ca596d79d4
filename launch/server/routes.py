"""The OpenAI-compatible routes: completions, chat, tokenize and detokenize.

Called by: app.py, which wraps each with the error boundary. A request is checked, tokenised and admitted
before its answer begins, so that everything that is wrong with it has a status of its own.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...engine.errors import InvalidRequestError
from ...engine.input_processor import MAX_CHARACTERS_PER_TOKEN
from .errors import ApiError, ClientGoneError, invalid
from .generation import Job, Piece, UsageCounter, run_jobs
from .protocol import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletionRequest,
    ChatResponse,
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    Delta,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    Usage,
)
from .service import Service
from .sse import EventStream, event, run_watched
from .validation import decode_body, request_options, sampling_params, split_prompts, template_messages

THREAD_CHARACTERS = 1 << 14
"""A longer text is tokenised in a thread: the event loop has other clients."""
RESERVED_VARIABLES = frozenset({"self", "messages", "tools", "documents", "add_generation_prompt"})


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


async def create_completion(service: Service, request: Request) -> Response:
    """POST /v1/completions."""
    body = decode_body(await read_body(service, request), CompletionRequest)
    service.check_model(body.model)
    service.check_open()
    params = sampling_params(body, vocab_size=service.vocab_size)
    prompts = split_prompts(body.prompt, vocab_size=service.vocab_size, max_prompts=service.max_prompts)
    header = _header("cmpl", service)
    jobs, echoes = [], []
    for index, prompt in enumerate(prompts):
        ids = prompt
        if isinstance(prompt, str):
            ids = await _encode(service, prompt, add_special_tokens=body.add_special_tokens is not False)
        assert isinstance(ids, list)
        fitting = params
        if body.max_tokens is None and len(ids) + (params.max_tokens or 0) > service.max_model_len:
            # The default is ours, not the client's: near the end of the context it gives way.
            fitting = msgspec.structs.replace(params, max_tokens=None)
        jobs.append(
            Job(
                index=index * params.n,
                request_id=f"{header.id}-{index}",
                prompt_token_ids=ids,
                params=fitting,
                options=request_options(body),
            )
        )
        echo = ""
        if body.echo:
            echo = prompt if isinstance(prompt, str) else service.codec.decode(ids)
        echoes += [echo] * params.n
    counter = UsageCounter(sum(len(job.prompt_token_ids) for job in jobs))
    if body.stream:
        pieces, first = await _start(service, request, jobs)
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        return EventStream(
            _completion_events(header, pieces, first, counter, echoes=echoes, include_usage=include_usage),
            service.gate,
        )
    answers = await run_watched(request.receive, service.gate, _collect(service, jobs, counter))
    choices = [
        CompletionChoice(
            index=index,
            text=echoes[index] + text,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
        )
        for index, (text, last) in enumerate(answers)
    ]
    return json_response(
        CompletionResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            system_fingerprint=header.fingerprint,
            choices=choices,
            usage=counter.usage(),
        )
    )


async def create_chat_completion(service: Service, request: Request) -> Response:
    """POST /v1/chat/completions."""
    body = decode_body(await read_body(service, request), ChatCompletionRequest)
    service.check_model(body.model)
    service.check_open()
    params = sampling_params(body, vocab_size=service.vocab_size)
    variables = body.chat_template_kwargs or {}
    if reserved := RESERVED_VARIABLES & variables.keys():
        raise invalid("chat_template_kwargs", f"must not hold {sorted(reserved)[0]!r}")
    text = service.renderer.render(
        template_messages(body.messages),
        add_generation_prompt=body.add_generation_prompt is not False,
        **variables,
    )
    header = _header("chatcmpl", service)
    try:
        # Templates write the special tokens themselves; a second one at the front would be a different prompt.
        ids = await _encode(service, text, add_special_tokens=bool(body.add_special_tokens))
        options = request_options(body)
        jobs = [Job(index=0, request_id=header.id, prompt_token_ids=ids, params=params, options=options)]
        counter = UsageCounter(len(ids))
        if body.stream:
            pieces, first = await _start(service, request, jobs)
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            return EventStream(
                _chat_events(
                    header, pieces, first, counter, num_choices=params.n, include_usage=include_usage
                ),
                service.gate,
            )
        answers = await run_watched(request.receive, service.gate, _collect(service, jobs, counter))
    except InvalidRequestError as error:
        raise _in_chat_words(error, body) from None
    choices = []
    for index, (answer, last) in enumerate(answers):
        assert last.finish_reason is not None
        choices.append(
            ChatChoice(
                index=index,
                message=AnswerMessage(content=answer),
                finish_reason=last.finish_reason,
                stop_reason=last.stop_reason,
            )
        )
    return json_response(
        ChatResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            system_fingerprint=header.fingerprint,
            choices=choices,
            usage=counter.usage(),
        )
    )


async def tokenize(service: Service, request: Request) -> Response:
    """POST /tokenize."""
    body = decode_body(await read_body(service, request), TokenizeRequest)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if body.prompt is not None:
        ids = await _encode(service, body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        text = service.renderer.render(
            template_messages(body.messages or []),
            add_generation_prompt=body.add_generation_prompt is not False,
        )
        ids = await _encode(service, text, add_special_tokens=bool(body.add_special_tokens))
    strings = None
    if body.return_token_strs:
        strings = [service.codec.decode([token_id], skip_special_tokens=False) for token_id in ids]
    return json_response(
        TokenizeResponse(count=len(ids), max_model_len=service.max_model_len, tokens=ids, token_strs=strings)
    )


async def detokenize(service: Service, request: Request) -> Response:
    """POST /detokenize."""
    body = decode_body(await read_body(service, request), DetokenizeRequest)
    service.check_model(body.model)
    for token_id in body.tokens:
        if not 0 <= token_id < service.vocab_size:
            raise invalid(
                "tokens", f"token id {token_id} is not in the vocabulary, [0, {service.vocab_size - 1}]"
            )
    return json_response(
        DetokenizeResponse(prompt=service.codec.decode(body.tokens, skip_special_tokens=False))
    )


async def read_body(service: Service, request: Request) -> bytes:
    """Read the body of a request that must be JSON. Raises ApiError 415, 413; ClientGoneError."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body must be application/json, not {kind}", code="unsupported_media_type")
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > service.max_body_bytes:
                raise ApiError(
                    413, f"the body is larger than {service.max_body_bytes} bytes", code="body_too_large"
                )
    except ClientDisconnect:
        raise ClientGoneError from None
    return bytes(body)


def json_response(value: Any, status: int = 200) -> Response:
    """Encode a value as an answer."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


async def _start(
    service: Service, request: Request, jobs: Sequence[Job]
) -> tuple[AsyncGenerator[Piece, None], Piece]:
    """Wait for the first piece: until then an error still has a status, and a client may leave."""
    pieces = run_jobs(service, jobs)
    try:
        return pieces, await run_watched(request.receive, service.gate, anext(pieces))
    except BaseException:
        await pieces.aclose()
        raise


async def _collect(service: Service, jobs: Sequence[Job], counter: UsageCounter) -> list[tuple[str, Piece]]:
    """Run all jobs to their ends. Returns the whole text and the last piece of each choice, in order."""
    choices = [index for job in jobs for index in job.choices]
    texts: dict[int, list[str]] = {index: [] for index in choices}
    last: dict[int, Piece] = {}
    async for piece in run_jobs(service, jobs):
        counter.add(piece)
        texts[piece.index].append(piece.text)
        last[piece.index] = piece
    return [("".join(texts[index]), last[index]) for index in choices]


async def _with_first(first: Piece, rest: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
    try:
        yield first
        async for piece in rest:
            yield piece
    finally:
        await rest.aclose()


async def _completion_events(
    header: Header,
    rest: AsyncGenerator[Piece, None],
    first: Piece,
    counter: UsageCounter,
    *,
    echoes: Sequence[str],
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    # null in all chunks but the last when usage was asked for, absent when it was not.
    no_usage: UnsetType | None = None if include_usage else UNSET

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

    pieces = _with_first(first, rest)
    try:
        if any(echoes):
            yield chunk([CompletionChoice(index=i, text=text) for i, text in enumerate(echoes)], no_usage)
        async for piece in pieces:
            counter.add(piece)
            if piece.text or piece.finish_reason:
                choice = CompletionChoice(
                    index=piece.index,
                    text=piece.text,
                    finish_reason=piece.finish_reason,
                    stop_reason=piece.stop_reason,
                )
                yield chunk([choice], no_usage)
        if include_usage:
            yield chunk([], counter.usage())
    finally:
        await pieces.aclose()


async def _chat_events(
    header: Header,
    rest: AsyncGenerator[Piece, None],
    first: Piece,
    counter: UsageCounter,
    *,
    num_choices: int,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    no_usage: UnsetType | None = None if include_usage else UNSET

    def chunk(index: int, delta: Delta, finish_reason: str | None = None) -> bytes:
        choice = ChatChunkChoice(index=index, delta=delta, finish_reason=finish_reason)
        return event(
            ChatChunk(
                id=header.id,
                created=header.created,
                model=header.model,
                system_fingerprint=header.fingerprint,
                choices=[choice],
                usage=no_usage,
            )
        )

    pieces = _with_first(first, rest)
    try:
        for index in range(num_choices):
            yield chunk(index, Delta(role="assistant", content=""))
        async for piece in pieces:
            counter.add(piece)
            if piece.text:
                yield chunk(piece.index, Delta(content=piece.text))
            if piece.finish_reason is not None:
                yield chunk(piece.index, Delta(), piece.finish_reason)
        if include_usage:
            yield event(
                ChatChunk(
                    id=header.id,
                    created=header.created,
                    model=header.model,
                    system_fingerprint=header.fingerprint,
                    choices=[],
                    usage=counter.usage(),
                )
            )
    finally:
        await pieces.aclose()


async def _encode(service: Service, text: str, *, add_special_tokens: bool) -> list[int]:
    # Checked before it is encoded, which takes seconds for what can never fit.
    if len(text) > service.max_model_len * MAX_CHARACTERS_PER_TOKEN:
        raise InvalidRequestError(f"the prompt of {len(text)} characters is too long", field="prompt")
    if len(text) < THREAD_CHARACTERS:
        return service.codec.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(service.codec.encode, text, add_special_tokens=add_special_tokens)


def _in_chat_words(error: InvalidRequestError, body: ChatCompletionRequest) -> InvalidRequestError:
    """Name the fields that a chat client wrote, not those that the engine knows."""
    names = {"prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return InvalidRequestError(error.message, field=names.get(error.field or "", error.field))


def _header(prefix: str, service: Service) -> Header:
    return Header(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=service.model_name,
        fingerprint=service.weights_version,
    )
