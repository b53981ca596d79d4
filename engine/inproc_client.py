"""InprocCoreClient: an engine core in this very process, without sockets.

Called by: `LLM`, in the caller's thread. When a worker dies, the next call raises ReplicaLostError.
"""

from collections.abc import Iterable
from typing import TypeVar

from ..shm.errors import ProcessError
from ..workers.hooks import HookOutcome
from .core import EngineCore
from .errors import ReplicaLostError
from .messages import EngineCoreRequest, StepOutputs

T = TypeVar("T")

_GRAMMAR_WAIT_S = 0.1
"""Between two looks at Ctrl-C and deadlines, while nothing but grammars is under way."""


class InprocCoreClient:
    """An engine core in this process, driven by whoever waits for outputs. For `LLM`; one thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    @property
    def has_work(self) -> bool:
        """True while `get_outputs` has something to do, or to wait for."""
        return self._core.has_work or self._core.num_unfinished_requests > 0

    @property
    def num_free_places(self) -> int:
        """Requests that may be added now without being refused because the queue is full."""
        return self._core.num_free_places

    def add_request(self, request: EngineCoreRequest) -> None:
        """Let a request wait for the next step."""
        self._core.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget requests."""
        self._core.abort_requests(request_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing done, while any request holds blocks."""
        return self._core.reset_prefix_cache()

    def get_outputs(self) -> StepOutputs:
        """Compute one step and return its outputs. Raises ReplicaLostError when a worker died.

        Where all requests wait for their grammars: wait a moment for one, and return what there is.
        """
        if not self._core.has_work:
            self._core.take_grammars(_GRAMMAR_WAIT_S)
        self._core.take_grammars()
        try:
            outputs = self._core.step()
        except ProcessError as error:
            raise ReplicaLostError(f"the engine was lost: {error}") from error
        # There is one client, whose index is that of all requests.
        return next(iter(outputs.values()), StepOutputs())

    def collective_rpc(
        self,
        name: str,
        argument: object = None,
        *,
        result_type: type[T] | None = None,
        timeout_s: float | None = None,
    ) -> list[HookOutcome[T]]:
        """Run a hook on every rank; see Executor. Raises ReplicaLostError when a worker died."""
        try:
            return self._core.collective_rpc(name, argument, result_type=result_type, timeout_s=timeout_s)
        except ProcessError as error:
            raise ReplicaLostError(f"the engine was lost: {error}") from error

    def close(self, *, reason: str) -> None:
        """End the workers. Idempotent."""
        self._core.close(reason=reason)
