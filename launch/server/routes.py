"""The OpenAI-compatible routes: completions, chat, tokenize and detokenize.

Called by: app.py, which wraps each with the error boundary. A request is checked, tokenised and admitted
before its answer begins, so that everything that is wrong with it has a status of its own.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...engine.errors import InvalidRequestError
from .answers import (
    Answer,
    CompletionForm,
    Header,
    chat_choices,
    chat_events,
    collect,
    completion_choices,
    completion_events,
)
from .errors import ApiError, ClientGoneError, invalid
from .generation import Job, Piece, UsageCounter, run_jobs
from .logprobs import prompt_logprobs
from .prompts import beside, encode, fit, fit_prompts, show
from .protocol import (
    ChatCompletionRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    PromptLogprobs,
    SamplingFields,
    TokenizeRequest,
    TokenizeResponse,
)
from .routing_headers import with_routing
from .service import Service
from .sse import QUIET_S, EventStream, run_watched
from .validation import (
    check_num_samples,
    checked_ids,
    decode_body,
    is_scoring,
    request_options,
    sampling_params,
    split_prompts,
    template_messages,
)

BODY_S = 300.0
"""For a body to arrive. Who sends it byte by byte holds a place, and in the end the memory of the largest one."""
RESERVED_VARIABLES = frozenset({"self", "messages", "tools", "documents", "add_generation_prompt"})


async def create_completion(service: Service, request: Request) -> Response:
    """POST /v1/completions."""
    raw = await read_body(service, request)
    body = decode_body(raw, CompletionRequest)
    service.check_model(body.model)
    service.check_open()
    params = await beside(len(raw), lambda: sampling_params(body, vocab_size=service.vocab_size))
    prompts = split_prompts(body.prompt, vocab_size=service.vocab_size, max_prompts=service.max_prompts)
    check_num_samples(len(prompts), params)
    header = _header("cmpl", service)
    options = with_routing(request_options(body), request, body.user)
    jobs: list[Job] = []
    forms: list[CompletionForm] = []
    for index, prompt in enumerate(await fit_prompts(service, body, params, prompts)):
        ids = prompt.token_ids
        fitting = params
        if body.max_tokens is None and len(ids) + (params.max_tokens or 0) > service.max_model_len:
            # The default is ours, not the client's: near the end of the context it gives way.
            fitting = msgspec.structs.replace(params, max_tokens=None)
        job = Job(
            index=index * params.n,
            request_id=f"{header.id}-{index}",
            prompt_token_ids=ids,
            params=fitting,
            options=options,
            is_scoring=is_scoring(body),
        )
        jobs.append(job)
        form = CompletionForm(
            job=job,
            codec=service.codec,
            echo=prompt.echo,
            shows_prompt_logprobs=body.prompt_logprobs is not None,
        )
        forms += [form] * params.n
    request.state.request_ids = [job.request_id for job in jobs]
    counter = UsageCounter(sum(len(job.prompt_token_ids) for job in jobs))
    try:
        if body.stream:
            pieces = await _start(service, request, jobs)
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            return EventStream(
                completion_events(header, pieces, counter, forms=forms, include_usage=include_usage),
                service.gate,
            )
        answers = await run_watched(request.receive, service.gate, _collect(service, jobs, counter))
    except InvalidRequestError as error:
        raise _in_clients_words(error, body) from None
    return json_response(
        CompletionResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            system_fingerprint=header.fingerprint,
            choices=completion_choices(forms, answers),
            usage=counter.usage(),
        )
    )


async def create_chat_completion(service: Service, request: Request) -> Response:
    """POST /v1/chat/completions."""
    raw = await read_body(service, request)
    body = decode_body(raw, ChatCompletionRequest)
    service.check_model(body.model)
    service.check_open()
    params = await beside(len(raw), lambda: sampling_params(body, vocab_size=service.vocab_size))
    variables = body.chat_template_kwargs or {}
    if reserved := RESERVED_VARIABLES & variables.keys():
        raise invalid("chat_template_kwargs", f"must not hold {sorted(reserved)[0]!r}")
    header = _header("chatcmpl", service)

    def read() -> list[int]:
        text = service.renderer.render(
            template_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False,
            **variables,
        )
        # Templates write the special tokens themselves; a second one at the front would be a different prompt.
        ids = encode(service, text, add_special_tokens=bool(body.add_special_tokens))
        return fit(service, ids, body, params)

    try:
        ids = await beside(len(raw), read)
        options = with_routing(request_options(body), request, body.user)
        jobs = [Job(index=0, request_id=header.id, prompt_token_ids=ids, params=params, options=options)]
        request.state.request_ids = [header.id]
        counter = UsageCounter(len(ids))
        if body.stream:
            pieces = await _start(service, request, jobs)
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            return EventStream(
                chat_events(
                    header,
                    pieces,
                    counter,
                    num_choices=params.n,
                    num_top=params.logprobs,
                    include_usage=include_usage,
                ),
                service.gate,
            )
        answers = await run_watched(request.receive, service.gate, _collect(service, jobs, counter))
    except InvalidRequestError as error:
        raise _in_clients_words(error, body) from None
    shown: PromptLogprobs | UnsetType = UNSET
    if answers[0].prompt_logprobs is not None:
        shown = prompt_logprobs(answers[0].prompt_logprobs)
    return json_response(
        ChatResponse(
            id=header.id,
            created=header.created,
            model=header.model,
            system_fingerprint=header.fingerprint,
            choices=chat_choices(answers, num_top=params.logprobs),
            usage=counter.usage(),
            prompt_logprobs=shown,
        )
    )


async def tokenize(service: Service, request: Request) -> Response:
    """POST /tokenize."""
    raw = await read_body(service, request)
    body = decode_body(raw, TokenizeRequest)
    service.check_model(body.model)
    prompt, messages = body.prompt, body.messages
    if (prompt is None) == (messages is None):
        raise invalid("prompt", "give either prompt or messages")

    def work() -> Response:
        if prompt is not None:
            ids = encode(service, prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            text = service.renderer.render(
                template_messages(messages or []),
                add_generation_prompt=body.add_generation_prompt is not False,
            )
            adds = bool(body.add_special_tokens)
            ids = encode(service, text, add_special_tokens=adds, field="messages")
        strings = [show(service, [token_id]) for token_id in ids] if body.return_token_strs else None
        return json_response(
            TokenizeResponse(
                count=len(ids), max_model_len=service.max_model_len, tokens=ids, token_strs=strings
            )
        )

    return await beside(len(raw), work)


async def detokenize(service: Service, request: Request) -> Response:
    """POST /detokenize."""
    body = decode_body(await read_body(service, request), DetokenizeRequest)
    service.check_model(body.model)
    ids = checked_ids("tokens", body.tokens, service.vocab_size)
    return json_response(DetokenizeResponse(prompt=await beside(len(ids), lambda: show(service, ids))))


async def read_body(service: Service, request: Request) -> bytes:
    """Read the body of a request that must be JSON. Raises ApiError 415, 413, 408, 503; ClientGoneError."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body must be application/json, not {kind}", code="unsupported_media_type")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise ApiError(
            415, f"the body must not be encoded, not even with {coding}", code="unsupported_encoding"
        )
    body = bytearray()
    try:
        async with service.gate.reading(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > service.max_body_bytes:
                    raise ApiError(
                        413, f"the body is larger than {service.max_body_bytes} bytes", code="body_too_large"
                    )
    except ClientDisconnect:
        raise ClientGoneError from None
    except TimeoutError:
        service.check_open()
        raise ApiError(
            408, "the body did not arrive in time", code="timeout", headers={"Connection": "close"}
        ) from None
    return bytes(body)


def json_response(value: Any, status: int = 200) -> Response:
    """Encode a value as an answer."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


async def _start(service: Service, request: Request, jobs: Sequence[Job]) -> AsyncGenerator[Piece, None]:
    """Wait for the first piece: until then an error still has a status, and a client may leave.

    One that is long in coming is left to the stream, which can say meanwhile that it lives.
    """
    pieces = run_jobs(service, jobs)
    first = asyncio.ensure_future(anext(pieces))
    try:
        await run_watched(request.receive, service.gate, asyncio.wait({first}, timeout=QUIET_S))
        if first.done():
            first.result()
    except BaseException:
        await _give_up(first, pieces)
        raise
    return _with_first(first, pieces)


async def _collect(service: Service, jobs: Sequence[Job], counter: UsageCounter) -> list[Answer]:
    """Run all jobs to their ends."""
    return await collect(run_jobs(service, jobs), counter)


async def _with_first(
    first: "asyncio.Future[Piece]", rest: AsyncGenerator[Piece, None]
) -> AsyncGenerator[Piece, None]:
    try:
        yield await first
        async for piece in rest:
            yield piece
    finally:
        await _give_up(first, rest)


async def _give_up(first: "asyncio.Future[Piece]", rest: AsyncGenerator[Piece, None]) -> None:
    """End the pieces, also while the first is awaited."""
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await rest.aclose()


def _in_clients_words(error: InvalidRequestError, body: SamplingFields) -> InvalidRequestError:
    """Name the fields that the client wrote, not those that the engine knows."""
    names: dict[str, str] = {}
    if isinstance(body, ChatCompletionRequest):
        names |= {"prompt": "messages", "logprobs": "top_logprobs"}
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    if body.response_format is not None:
        names["structured_outputs"] = "response_format"
    field = error.field or ""
    name = names.get(field, field)
    message = error.message
    if field and message.startswith((f"{field}: ", f"{field} ")):
        message = name + message.removeprefix(field)
    return InvalidRequestError(message, field=name or None)


def _header(prefix: str, service: Service) -> Header:
    return Header(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=service.model_name,
        fingerprint=service.weights_version,
    )
