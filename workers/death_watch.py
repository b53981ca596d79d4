"""DeathWatch: notices at once when a process ends, also while nobody waits for it.

Called by: WorkerGroup, once all its workers are ready. One thread, which sleeps until a pidfd is readable.
Invariant: only the first death is reported; `failure` never changes afterwards.
"""

import os
import select
import threading
from collections.abc import Callable, Sequence

from ..shm.errors import ProcessDiedError, ProcessError
from ..shm.process import ChildProcess


class DeathWatch:
    """Watches children; from `start` to `stop` it alone calls their `receive`.

    on_death:   called once, from the watching thread, with the first death
    last_phase: says what a child was doing, for the error
    failure:    the first death, None while all live; set before `on_death` is called. Any thread may read it
    """

    def __init__(
        self, on_death: Callable[[ProcessError], None], last_phase: Callable[[ChildProcess], str]
    ) -> None:
        self.failure: ProcessError | None = None
        self._on_death = on_death
        self._last_phase = last_phase
        self._has_failed = threading.Event()
        self._stop_fd = -1
        self._thread: threading.Thread | None = None

    def start(self, name: str, children: Sequence[ChildProcess]) -> None:
        """Start the thread. `children` must stay open until `stop`."""
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(
            target=self._run, args=(children,), name=f"death-watch-{name}", daemon=True
        )
        self._thread.start()

    def wait_failure(self, timeout_s: float) -> ProcessError | None:
        """Wait at most `timeout_s` for a death; None when there was none."""
        self._has_failed.wait(timeout_s)
        return self.failure

    def stop(self) -> None:
        """End the thread. Idempotent. Not from within `on_death`."""
        if self._thread is None:
            return
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)
        self._thread = None

    def _run(self, children: Sequence[ChildProcess]) -> None:
        by_pidfd = {child.pidfd: child for child in children}
        poller = select.poll()
        for fd in (self._stop_fd, *by_pidfd):
            poller.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poller.poll()]
        if self._stop_fd in ready:
            return
        child = by_pidfd[ready[0]]
        # Everything the child said was sent before it ended, so it can be read now.
        child.receive()
        child.last_phase = self._last_phase(child)
        self.failure = child.death(ProcessDiedError)
        self._has_failed.set()
        self._on_death(self.failure)
