"""One streamed request against an OpenAI-compatible server, and what was seen of it.

Called by: serve.py, one task for each request under way. Never raises for what a server does: that is in the record.
"""

import asyncio
import time
from enum import StrEnum

import msgspec

from .errors import BenchError
from .http_client import HttpClient, Response
from .sse_decoder import SseDecoder
from .workload import RequestSpec

DONE = b"[DONE]"
_MAX_ERROR_KIND = 60
_MAX_ERROR_TEXT = 160


class Endpoint(StrEnum):
    """Which of the API's two ways to generate."""

    COMPLETIONS = "completions"
    CHAT = "chat"


_PATHS = {Endpoint.COMPLETIONS: "/v1/completions", Endpoint.CHAT: "/v1/chat/completions"}


class RequestRecord(msgspec.Struct, kw_only=True):
    """What became of one request. Instants are `time.perf_counter()`.

    due_at:            when it should have been sent
    token_at:          when each piece of the stream with text came; a piece may hold several tokens
    num_prompt_tokens, num_output_tokens: as the server counted; output: pieces, when it did not
    response_id:       what the server calls it
    text:              all of it, if it is kept
    error:             what kind of failure; None: it ended well
    error_detail:      what the server said of it
    """

    index: int
    due_at: float
    sent_at: float
    ended_at: float = 0.0
    token_at: list[float] = []
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    response_id: str = ""
    text: str = ""
    error: str | None = None
    error_detail: str = ""


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


_NO_ERROR = msgspec.Raw(b"null")


class _Chunk(msgspec.Struct, frozen=True):
    id: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = _NO_ERROR


class _Models(msgspec.Struct, frozen=True):
    class Model(msgspec.Struct, frozen=True):
        id: str

    data: list[Model]


class OpenAIClient:
    """Sends requests to one server.

    ignore_eos: ask for exactly the output length; a field that servers of this kind understand beyond OpenAI's
    timeout_s:  for one request, from its sending to its end
    keeps_text: also note what the completions endpoint wrote
    """

    def __init__(
        self,
        http: HttpClient,
        *,
        endpoint: Endpoint,
        model: str,
        ignore_eos: bool,
        temperature: float,
        timeout_s: float,
        keeps_text: bool = False,
    ) -> None:
        self.model = model
        self._http = http
        self._keeps_text = keeps_text
        self._endpoint = endpoint
        self._fields: dict[str, object] = {
            "model": model,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:
            self._fields["ignore_eos"] = True
        self._timeout_s = timeout_s
        self._decoder = msgspec.json.Decoder(_Chunk)

    def encode(self, spec: RequestSpec) -> bytes:
        """Return the body of a request. Done before the measurement begins."""
        fields = {**self._fields, "max_tokens": spec.num_output_tokens}
        if self._endpoint is Endpoint.CHAT:
            return msgspec.json.encode({**fields, "messages": [{"role": "user", "content": spec.prompt}]})
        return msgspec.json.encode({**fields, "prompt": spec.prompt})

    async def run(self, index: int, body: bytes, due_at: float) -> RequestRecord:
        """Send one request and read its stream to the end."""
        record = RequestRecord(index=index, due_at=due_at, sent_at=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._run(body, record)
        except TimeoutError:
            record.error = "timeout"
        except OSError as error:
            record.error = f"connection: {type(error).__name__}"
            record.error_detail = str(error)[:_MAX_ERROR_TEXT]
        except (msgspec.MsgspecError, UnicodeDecodeError):
            record.error = "a chunk that does not decode"
        if record.error is not None or not record.ended_at:
            record.ended_at = time.perf_counter()
        return record

    async def _run(self, body: bytes, record: RequestRecord) -> None:
        response = await self._http.send("POST", _PATHS[self._endpoint], body)
        try:
            if response.status != 200:
                said = await response.read()
                record.error = f"status {response.status}"
                record.error_detail = said.decode(errors="replace")[:_MAX_ERROR_TEXT]
                return
            await self._read_stream(response, record)
        finally:
            response.close()

    async def _read_stream(self, response: Response, record: RequestRecord) -> None:
        events, is_done = SseDecoder(), False
        while (piece := await response.next_piece()) is not None:
            for data in events.feed(piece.data):
                if data == DONE:
                    is_done = True
                elif not is_done:
                    self._take(self._decoder.decode(data), piece.at, record)
        if record.error is None and record.finish_reason is None:
            record.error = "the stream ended early"

    def _take(self, chunk: _Chunk, at: float, record: RequestRecord) -> None:
        if bytes(chunk.error) != b"null":
            record.error = f"error event: {_error_kind(chunk.error)}"
            record.error_detail = bytes(chunk.error).decode(errors="replace")[:_MAX_ERROR_TEXT]
        if chunk.usage is not None:
            record.num_prompt_tokens = chunk.usage.prompt_tokens
            record.num_output_tokens = chunk.usage.completion_tokens
        if chunk.id:
            record.response_id = chunk.id
        for choice in chunk.choices:
            if self._keeps_text and choice.text:
                record.text += choice.text
            if choice.has_text:
                record.token_at.append(at)
                if chunk.usage is None:
                    record.num_output_tokens += 1
            if choice.finish_reason is not None:
                record.finish_reason = choice.finish_reason
                record.ended_at = at
                if not record.token_at:
                    # All that it wrote was held back or empty: the end is the first that can be seen of it.
                    record.token_at.append(at)


async def find_model(http: HttpClient) -> str:
    """Ask a server which model it serves; the first one it names. Raises BenchError."""
    try:
        response = await http.send("GET", "/v1/models")
        try:
            body = await response.read()
        finally:
            response.close()
        if response.status != 200:
            raise BenchError(f"the server answers /v1/models with status {response.status}")
        models = msgspec.json.decode(body, type=_Models).data
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchError(f"the server does not say which models it has: {error}") from None
    if not models:
        raise BenchError("the server has no models")
    return models[0].id


def _error_kind(raw: msgspec.Raw) -> str:
    """Name an error event: its type or code, else the beginning of what it says."""
    error = msgspec.json.decode(raw)
    if isinstance(error, dict):
        error = error.get("type") or error.get("code") or error.get("message")
    return str(error)[:_MAX_ERROR_KIND]
