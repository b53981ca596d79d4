"""What the routes need, in one value: the engine, the tokenizer, the cluster's state, and the gate.

Called by: process.py builds it from the real parts, tests from small ones. The protocols here say exactly
which part of each is used. Everything runs on the event loop of one API-server process.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from ...cluster.messages import ReplicaState
from ...cluster.routing import Decision
from ...engine.input_processor import DEFAULT_OPTIONS, RequestOptions
from ...engine.messages import EngineStats
from ...engine.outputs import RequestOutput
from ...workers.sampling_params import SamplingParams
from ..metrics import ServerMetrics
from .cluster_link import ClusterPort
from .errors import RETRY_SOON_S, ApiError

LATE_BODY_S = 1.0
"""For a body to arrive once the server drains: it is on its way, or it never comes."""


class Engine(Protocol):
    """Generates; `AsyncLLM` in serving. Closing the iterator early aborts the request."""

    def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the output since the last yield, until it is finished."""
        ...


class TextCodec(Protocol):
    """The model's tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Token ids to text."""
        ...


class ChatRenderer(Protocol):
    """The model's chat template."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Messages to the text of the prompt."""
        ...


class ClusterView(Protocol):
    """Who serves, and how busy they are; `DpClient` in serving."""

    @property
    def num_ready(self) -> int:
        """Replicas that serve."""
        ...

    @property
    def is_coming_back(self) -> bool:
        """True while a replica is being started again: until it serves, requests may wait for it."""
        ...

    @property
    def replicas(self) -> Mapping[int, Any]:
        """All replicas."""
        ...

    @property
    def stats(self) -> Mapping[int, EngineStats]:
        """The newest report of each replica."""
        ...

    def decision(self, request_id: str) -> Decision | None:
        """Say where a request went, and why."""
        ...


class Gate:
    """Who may come in, and who is inside. Closed while the server drains. Owner: the event loop."""

    def __init__(self) -> None:
        self._is_draining = False
        self._num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._readings: set[asyncio.Timeout] = set()
        self.aborted = asyncio.Event()
        """Set when the drain's budget is spent: everything that still runs ends with an error."""

    @property
    def is_draining(self) -> bool:
        """True once no new request is let in."""
        return self._is_draining

    @property
    def num_inside(self) -> int:
        """HTTP requests that are being answered, streams included."""
        return self._num_inside

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count one request while it is answered."""
        self._num_inside += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._is_empty.set()

    @asynccontextmanager
    async def reading(self, limit_s: float) -> AsyncIterator[None]:
        """Bound the time that a request's body may take. A drain waits for none: the request would be refused anyway.

        Raises TimeoutError.
        """
        async with asyncio.timeout(LATE_BODY_S if self._is_draining else limit_s) as bound:
            self._readings.add(bound)
            try:
                yield
            finally:
                self._readings.discard(bound)

    async def drain(self, budget_s: float) -> bool:
        """Let nobody in, and wait until all have left; those that are left after `budget_s` are aborted.

        Returns True when all left by themselves.
        """
        self._is_draining = True
        for bound in self._readings:
            bound.reschedule(asyncio.get_running_loop().time() + LATE_BODY_S)
        try:
            async with asyncio.timeout(budget_s):
                await self._is_empty.wait()
        except TimeoutError:
            self.aborted.set()
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Everything that the routes use.

    model_name: what clients call the model; model_root: the folder's or hub's name behind it
    created_at: seconds since 1970, as /v1/models shows it
    api_key, admin_key: None: clients need none; administrators are not let in
    min_ready_replicas: with fewer, the cluster does not count as ready
    """

    engine: Engine
    codec: TextCodec
    renderer: ChatRenderer
    cluster: ClusterView
    metrics: ServerMetrics
    gate: Gate
    model_name: str
    model_root: str
    created_at: int
    get_max_model_len: Callable[[], int]
    vocab_size: int
    max_prompts: int
    max_body_bytes: int
    api_key: str | None
    link: ClusterPort
    admin_key: str | None
    min_ready_replicas: int

    @property
    def weights_version(self) -> str | None:
        """What clients are told of the weights: the version that serves; while replicas change over, both."""
        fleet = self.link.fleet
        if fleet is None:
            return None
        serving = [replica for replica in fleet.replicas if replica.state is ReplicaState.READY]
        return ",".join(sorted({replica.weights_version for replica in serving})) or None

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output in tokens: what the model knows, and every replica's KV cache holds."""
        return self.get_max_model_len()

    def check_open(self) -> None:
        """Raise the 503 that a request gets when nothing can serve it now."""
        if self.gate.is_draining:
            raise ApiError(503, "the server is stopping", code="server_stopping", retry_after_s=RETRY_SOON_S)
        if self.cluster.num_ready == 0 and not self.cluster.is_coming_back:
            raise ApiError(503, "no replica is ready to serve", code="no_replica", retry_after_s=RETRY_SOON_S)

    def check_model(self, name: str | None) -> None:
        """Raise the 404 for a model that is not the one served. None: the one that is."""
        if name is not None and name != self.model_name:
            message = f"the model {name!r} does not exist; this server has {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
