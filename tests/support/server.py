"""A small engine, tokenizer and cluster behind the real application: one character is one token."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from phalanx.cluster.messages import AdminKind, AdminResult, AdminStatus, FleetUpdate
from phalanx.cluster.routing import Decision
from phalanx.engine.errors import InvalidRequestError
from phalanx.engine.input_processor import DEFAULT_OPTIONS, RequestOptions
from phalanx.engine.logprobs import Logprob
from phalanx.engine.messages import EngineStats, FinishReason
from phalanx.engine.outputs import CompletionOutput, RequestOutput, RequestTimes
from phalanx.launch.config import ServerConfig
from phalanx.launch.listener import bind_listener, listener_url
from phalanx.launch.metrics import ServerMetrics
from phalanx.launch.server.app import create_app
from phalanx.launch.server.http_server import make_server
from phalanx.launch.server.service import Gate, Service
from phalanx.workers.sampling_params import SamplingParams

VOCAB_SIZE = 256
MAX_MODEL_LEN = 64
ANSWER = "Hello, world!"


class LetterCodec:
    """Latin-1 letters as tokens; other characters are token 0."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) if ord(letter) < VOCAB_SIZE else 0 for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token_id) for token_id in token_ids)


class LineRenderer:
    """A chat template that writes one line for each message."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        lines = [f"{message['role']}:{message['content']}\n" for message in messages]
        return "".join(lines) + ("A:" if add_generation_prompt else "")


def letter_logprobs(letter: str, count: int) -> dict[int, Logprob]:
    """What is said of one letter: it, and the `count` letters after it; the last one could not be."""
    entries = {}
    for place in range(count + 1):
        token_id = (ord(letter) + place) % VOCAB_SIZE
        value = float("-inf") if place and place == count else -1.0 - place
        entries[token_id] = Logprob(
            logprob=value, rank=1 + place, text=chr(token_id), token_bytes=chr(token_id).encode()
        )
    return entries


@dataclass
class FakeEngine:
    """Answers ANSWER, two letters at a time, cut to max_tokens; keeps what it was asked.

    error: raised instead of an answer, after `error_after` outputs
    entered, release: with `is_blocked`, each request says that it began, and waits
    """

    error: Exception | None = None
    error_after: int = 0
    is_blocked: bool = False
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    options: list[RequestOptions] = field(default_factory=list)
    num_running: int = 0

    async def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> AsyncIterator[RequestOutput]:
        assert isinstance(prompt, list)
        self.asked.append((prompt, sampling_params))
        self.options.append(options)
        room = MAX_MODEL_LEN - len(prompt)
        if not prompt or room < 1:
            raise InvalidRequestError("the prompt is empty or too long", field="prompt")
        max_tokens = room if sampling_params.max_tokens is None else sampling_params.max_tokens
        for name in ("logprobs", "prompt_logprobs"):
            if not 0 <= (getattr(sampling_params, name) or 0) <= 20:
                raise InvalidRequestError(f"{name} must be at most 20", field=name)
        if max_tokens > room:
            raise InvalidRequestError(f"max_tokens must be at most {room}", field="max_tokens")
        self.num_running += 1
        is_finished = False
        try:
            self.entered.set()
            if self.is_blocked:
                await self.release.wait()
            text = ANSWER[:max_tokens]
            pieces = [text[i : i + 2] for i in range(0, len(text), 2)]
            for index, piece in enumerate(pieces):
                if self.error is not None and index == self.error_after:
                    raise self.error
                is_last = index == len(pieces) - 1
                reason = FinishReason.STOP if len(text) == len(ANSWER) else FinishReason.LENGTH
                is_finished = is_last
                yield RequestOutput(
                    request_id=request_id or "",
                    prompt=None,
                    prompt_token_ids=prompt,
                    outputs=[
                        CompletionOutput(
                            text=piece,
                            token_ids=[ord(letter) for letter in piece],
                            finish_reason=reason if is_last else None,
                            index=sample,
                            logprobs=(
                                None
                                if sampling_params.logprobs is None
                                else [letter_logprobs(letter, sampling_params.logprobs) for letter in piece]
                            ),
                        )
                        for sample in range(sampling_params.n)
                    ],
                    finished=is_last,
                    num_cached_tokens=1,
                    num_output_tokens=2 * index + len(piece),
                    times=RequestTimes(arrived_at=0.0),
                    prompt_logprobs=(
                        None
                        if sampling_params.prompt_logprobs is None
                        else [
                            None,
                            *(letter_logprobs(chr(i), sampling_params.prompt_logprobs) for i in prompt[1:]),
                        ]
                    ),
                )
        finally:
            self.num_running -= 1
            if not is_finished:
                self.aborted.set()


@dataclass
class FakeCluster:
    """A cluster whose state the test writes down."""

    num_ready: int = 1
    is_coming_back: bool = False
    replicas: dict[int, Any] = field(default_factory=lambda: {0: None})
    stats: dict[int, EngineStats] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)
    any_decision: Decision | None = None

    def decision(self, request_id: str) -> Decision | None:
        return self.decisions.get(request_id, self.any_decision)


@dataclass
class FakeLink:
    """A supervisor whose word, and whose results, the test writes down."""

    fleet: FleetUpdate | None = None
    result: AdminResult = field(
        default_factory=lambda: AdminResult(command_id=0, status=AdminStatus.DONE, replicas=[])
    )
    commands: list[tuple[AdminKind, dict[str, Any]]] = field(default_factory=list)

    async def command(self, kind: AdminKind, **fields: Any) -> AdminResult:
        given = {name: value for name, value in fields.items() if value is not None}
        self.commands.append((kind, given))
        return self.result


def make_service(
    engine: FakeEngine | None = None,
    cluster: FakeCluster | None = None,
    *,
    api_key: str | None = None,
    **changes: Any,
) -> Service:
    """A service around the small parts."""
    cluster = cluster or FakeCluster()
    values: dict[str, Any] = {
        "engine": engine or FakeEngine(),
        "codec": LetterCodec(),
        "renderer": LineRenderer(),
        "cluster": cluster,
        "metrics": ServerMetrics("tiny", lambda: cluster.stats, lambda: cluster.num_ready),
        "gate": Gate(),
        "model_name": "tiny",
        "model_root": "/models/tiny",
        "created_at": 1700000000,
        "get_max_model_len": lambda: MAX_MODEL_LEN,
        "vocab_size": VOCAB_SIZE,
        "max_prompts": 8,
        "max_body_bytes": 1 << 20,
        "api_key": api_key,
        "link": FakeLink(),
        "admin_key": None,
        "min_ready_replicas": 1,
    }
    return Service(**{**values, **changes})


def make_stats(**changes: Any) -> EngineStats:
    """One replica's report."""
    values: dict[str, Any] = {
        "dp_rank": 0,
        "epoch": 0,
        "sequence": 1,
        "reported_at": 0.0,
        "num_waiting": 0,
        "num_running": 0,
        "num_prefill_tokens": 0,
        "kv_usage": 0.0,
        "num_free_blocks": 9,
        "num_free_tokens": 144,
        "num_blocks": 10,
    }
    return EngineStats(**{**values, **changes})


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[str]:
    """Serve on a port of its own until the block ends."""
    listener = bind_listener(ServerConfig(port=0))
    url = listener_url(listener)
    started = asyncio.Event()
    server = make_server(create_app(service), False, started.set)
    task = asyncio.create_task(server.serve([listener]))
    await started.wait()
    try:
        yield url
    finally:
        server.should_exit = True
        await task
