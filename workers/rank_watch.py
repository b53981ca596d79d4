"""RankWatch: notices at once when a rank dies, or a step fails on it, also while nobody waits for it.

Called by: WorkerGroup, once all its workers are ready. One thread, which sleeps until a pidfd or a lifeline is
readable. Ranks tell failures over the lifeline, beside the rings: those of a rank that does not answer steps, and
those that come after the step was answered by another, are seen as well.
Invariant: only the first cause is reported; `failure` never changes afterwards. A death counts before an error,
which may be what the peers of a dead rank see of it; among errors the earliest counts.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from ..shm.errors import ProcessDiedError, ProcessError, WorkerCallError
from ..shm.process import ChildProcess, Note
from .calls import WorkerFailure

_FIRST_CAUSE_WAIT_S = 0.1
"""After an error of one rank: for an earlier one, or the death of another that may have caused it, to be seen."""


class RankWatch:
    """Watches children; from `start` to `stop` it alone calls their `receive`.

    on_failure: called once, from the watching thread, with the first cause
    last_phase: says what a child was doing, for the error
    failure:    the first cause, None while all is well; set before `on_failure` is called. Any thread may read it
    """

    def __init__(
        self, on_failure: Callable[[ProcessError], None], last_phase: Callable[[ChildProcess], str]
    ) -> None:
        self.failure: ProcessError | None = None
        self._on_failure = on_failure
        self._last_phase = last_phase
        self._has_failed = threading.Event()
        self._stop_fd = -1
        self._thread: threading.Thread | None = None

    def start(self, name: str, children: Sequence[ChildProcess]) -> None:
        """Start the thread. `children` must stay open until `stop`."""
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(
            target=self._run, args=(children,), name=f"rank-watch-{name}", daemon=True
        )
        self._thread.start()

    def wait_failure(self, timeout_s: float) -> ProcessError | None:
        """Wait at most `timeout_s` for a failure; None when there was none."""
        self._has_failed.wait(timeout_s)
        return self.failure

    def stop(self) -> None:
        """End the thread. Idempotent. Not from within `on_failure`."""
        if self._thread is None:
            return
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)
        self._thread = None

    def _run(self, children: Sequence[ChildProcess]) -> None:
        failure = self._wait_first_cause(children)
        if failure is not None:
            self.failure = failure
            self._has_failed.set()
            self._on_failure(failure)

    def _wait_first_cause(self, children: Sequence[ChildProcess]) -> ProcessError | None:
        """Return the first cause; None when told to stop."""
        by_pidfd = {child.pidfd: child for child in children}
        by_lifeline = {child.lifeline_fd: child for child in children}
        poller = select.poll()
        for fd in (self._stop_fd, *by_pidfd, *by_lifeline):
            poller.register(fd, select.POLLIN)
        errors: list[tuple[WorkerFailure, ChildProcess]] = []
        decide_at: float | None = None
        while True:
            wait_ms = None if decide_at is None else max(0.0, decide_at - time.monotonic()) * 1000
            ready = [fd for fd, _ in poller.poll(wait_ms)]
            if self._stop_fd in ready:
                return None
            if not ready:
                return _error(*min(errors, key=lambda error: error[0].failed_at))
            for fd in ready:
                if (child := by_lifeline.get(fd)) is None:
                    continue
                messages = child.receive()
                if child.has_hung_up:
                    poller.unregister(fd)  # it has ended, and so will the process: the pidfd tells
                errors += [(_decode(note), child) for note in messages if isinstance(note, Note)]
            dead = [by_pidfd[fd] for fd in ready if fd in by_pidfd]
            if dead:
                # Killed from outside rather than brought down by the loss of a peer.
                return self._death(min(dead, key=lambda child: child.exitcode != -signal.SIGKILL))
            if errors and decide_at is None:
                decide_at = time.monotonic() + _FIRST_CAUSE_WAIT_S

    def _death(self, child: ChildProcess) -> ProcessDiedError:
        # Everything the child said was sent before it ended, so it can be read now.
        child.receive()
        child.last_phase = self._last_phase(child)
        error = child.death(ProcessDiedError)
        assert isinstance(error, ProcessDiedError)
        return error


def _decode(note: Note) -> WorkerFailure:
    return msgspec.msgpack.decode(note.payload, type=WorkerFailure)


def _error(failure: WorkerFailure, child: ChildProcess) -> WorkerCallError:
    where = f"in {failure.phase} of call {failure.call_id}"
    return WorkerCallError(
        child.role, rank=failure.tp_rank, detail=f"{failure.error} ({where})\n{failure.traceback}"
    )
