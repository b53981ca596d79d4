"""CompilerPool: grammars are compiled in threads, so that no step waits for one.

Called by: EngineCore, in its main thread. `on_done` is called from a thread of the pool: it wakes the main thread,
which then takes what is done. What waits for a request that ends meanwhile is left out (`forget`); what has begun for
it is told, and whoever takes it drops it.
The threads start with the first grammar; a cluster that never sees one has none.

A compilation cannot be interrupted. One that takes too long is given up, and another thread takes the place of
its thread, up to `MAX_STUCK_THREADS`; beyond that the line waits until one of them comes back, and what waits too
long in line is answered, too. The threads are daemons: a process that ends does not wait for them.

    submit -> WAITING -> RUNNING -> DONE -> take
                 |          |
                 +----------+-> GIVEN_UP -> give_up_late, or never told (forget)
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from queue import Empty, SimpleQueue

from ...workers.sampling_params import StructuredOutputs
from .backend import Grammar, GrammarCompiler, GrammarError
from .deep_stack import start_on_deep_stack

NUM_THREADS = 2
"""One long compilation does not hold up all others; more would take the cores of the ranks."""
MAX_STUCK_THREADS = 4
"""Threads that compile what was given up. Each takes a core from the ranks, or a share of one."""
CLOSE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The outcome for one request: a grammar, or what is wrong.

    is_overload: nothing is wrong with the specification, which nobody has looked at in time
    """

    request_id: str
    attempt: int
    grammar: Grammar | None = None
    error: str | None = None
    is_overload: bool = False


class _State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    GIVEN_UP = "given up"


@dataclass(slots=True, kw_only=True)
class _Job:
    """One compilation. `state` belongs to whoever holds the pool's lock."""

    request_id: str
    attempt: int
    spec: StructuredOutputs
    late_at: float
    state: _State = _State.WAITING


class CompilerPool:
    """Compilations under way, and those that nobody has taken. See the module.

    compiler:  used from the pool's threads
    timeout_s: from `submit` on; what is not compiled by then is given up
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        on_done: Callable[[], None],
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compiler = compiler
        self._on_done = on_done
        self._timeout_s = timeout_s
        self._clock = clock
        self._done: SimpleQueue[Compiled] = SimpleQueue()
        self._line: SimpleQueue[_Job | None] = SimpleQueue()
        # In the order of their time limits, which is that of their arrival.
        self._open: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._num_workers = 0
        self._num_stuck = 0
        self._is_closed = False

    @property
    def next_late_at(self) -> float | None:
        """When `give_up_late` has something to do, at the earliest."""
        with self._lock:
            while self._open and self._open[0].state in (_State.DONE, _State.GIVEN_UP):
                self._open.popleft()
        return self._open[0].late_at if self._open else None

    def submit(self, request_id: str, attempt: int, spec: StructuredOutputs) -> None:
        """Compile for a request. Never blocks."""
        job = _Job(request_id=request_id, attempt=attempt, spec=spec, late_at=self._clock() + self._timeout_s)
        self._open.append(job)
        self._line.put(job)
        self._start_workers()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Do not begin what nobody waits for any more; what has begun goes on. Unknown ids are ignored."""
        if not self._open:
            return
        unwanted = set(request_ids)
        with self._lock:
            for job in self._open:
                if job.state is _State.WAITING and job.request_id in unwanted:
                    job.state = _State.GIVEN_UP

    def take(self, timeout_s: float = 0.0) -> list[Compiled]:
        """Take all outcomes that are there; wait at most `timeout_s` for the first."""
        taken = []
        try:
            taken.append(self._done.get(block=timeout_s > 0, timeout=timeout_s or None))
            while True:
                taken.append(self._done.get_nowait())
        except Empty:
            return taken

    def give_up_late(self, now: float) -> list[Compiled]:
        """Give up what is not compiled in time, and say so. now: instant of the clock."""
        late = []
        while (late_at := self.next_late_at) is not None and late_at <= now:
            job = self._open.popleft()
            with self._lock:
                if job.state is _State.DONE:
                    continue
                has_begun = job.state is _State.RUNNING
                job.state = _State.GIVEN_UP
                if has_begun:
                    self._num_workers -= 1
                    self._num_stuck += 1
            error = f"structured_outputs: the grammar is not compiled after {self._timeout_s:g} s"
            if not has_begun:
                error = "too many grammars are being compiled"
            late.append(
                Compiled(
                    request_id=job.request_id, attempt=job.attempt, error=error, is_overload=not has_begun
                )
            )
        if late:
            self._start_workers()
        return late

    def close(self) -> None:
        """Drop what waits; wait at most a second for what is being compiled. Idempotent."""
        with self._lock:
            self._is_closed = True
        for _ in self._threads:
            self._line.put(None)
        deadline_at = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_at - time.monotonic()))
        self._threads.clear()

    def _start_workers(self) -> None:
        """Have as many threads as may be."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        with self._lock:
            num_allowed = min(NUM_THREADS, NUM_THREADS + MAX_STUCK_THREADS - self._num_stuck)
            num_missing = 0 if self._is_closed else max(0, num_allowed - self._num_workers)
            self._num_workers += num_missing
        for _ in range(num_missing):
            self._threads.append(start_on_deep_stack(self._work, "grammar"))

    def _work(self) -> None:
        """Compile one after the other, until the pool is closed or this thread has been replaced."""
        while (job := self._line.get()) is not None:
            with self._lock:
                if self._is_closed:
                    return
                if job.state is _State.GIVEN_UP:
                    continue
                job.state = _State.RUNNING
            compiled = self._compile(job)
            with self._lock:
                is_wanted = job.state is _State.RUNNING
                if is_wanted:
                    job.state = _State.DONE
                else:
                    self._num_stuck -= 1
                    if self._num_workers >= NUM_THREADS:
                        return
                    self._num_workers += 1
                is_closed = self._is_closed
            if is_wanted:
                self._done.put(compiled)
                if not is_closed:
                    self._on_done()

    def _compile(self, job: _Job) -> Compiled:
        grammar, error = None, None
        # The border of one request: whatever its grammar does to the library, the engine goes on.
        try:
            grammar = self._compiler.compile(job.spec)
        except GrammarError as problem:
            error = str(problem)
        except Exception as problem:
            error = f"the grammar cannot be compiled: {type(problem).__name__}"
        return Compiled(request_id=job.request_id, attempt=job.attempt, grammar=grammar, error=error)
