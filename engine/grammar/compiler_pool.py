"""CompilerPool: grammars are compiled in threads, so that no step waits for one.

Called by: EngineCore, in its main thread. `on_done` is called from a thread of the pool: it wakes the main thread,
which then takes what is done. A request that ends meanwhile is not told: whoever takes its result drops it.
The threads start with the first grammar; a cluster that never sees one has none.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ...workers.sampling_params import StructuredOutputs
from .backend import Grammar, GrammarCompiler, GrammarError

NUM_THREADS = 2
"""One long compilation does not hold up all others; more would take the cores of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The outcome for one request: a grammar, or what is wrong with its specification."""

    request_id: str
    attempt: int
    grammar: Grammar | None
    error: str | None


class CompilerPool:
    """Compilations under way, and those that nobody has taken. See the module.

    compiler: used from the pool's threads
    """

    def __init__(self, compiler: GrammarCompiler, on_done: Callable[[], None]) -> None:
        self._compiler = compiler
        self._on_done = on_done
        self._done: SimpleQueue[Compiled] = SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None
        self._is_closed = threading.Event()

    def submit(self, request_id: str, attempt: int, spec: StructuredOutputs) -> None:
        """Compile for a request. Never blocks."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._pool.submit(self._compile, request_id, attempt, spec)

    def take(self, timeout_s: float = 0.0) -> list[Compiled]:
        """Take all outcomes that are there; wait at most `timeout_s` for the first."""
        taken = []
        try:
            taken.append(self._done.get(block=timeout_s > 0, timeout=timeout_s or None))
            while True:
                taken.append(self._done.get_nowait())
        except Empty:
            return taken

    def close(self) -> None:
        """Drop what waits, and wait for what is being compiled. Idempotent."""
        self._is_closed.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _compile(self, request_id: str, attempt: int, spec: StructuredOutputs) -> None:
        grammar, error = None, None
        # The border of one request: whatever its grammar does to the library, the engine goes on.
        try:
            grammar = self._compiler.compile(spec)
        except GrammarError as problem:
            error = str(problem)
        except Exception as problem:
            error = f"the grammar cannot be compiled: {type(problem).__name__}"
        self._done.put(Compiled(request_id=request_id, attempt=attempt, grammar=grammar, error=error))
        if not self._is_closed.is_set():
            self._on_done()
