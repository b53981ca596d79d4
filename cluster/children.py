"""Children: the supervisor's processes by role.

Called by: the supervisor, in its main thread; front_ends.py and fleet_view.py look them up. A role keeps its last
process when that has ended, until there is another one; a role whose process could not be started may have none.
"""

import logging
import selectors
import time
from collections.abc import Iterable, Iterator, Mapping

from ..shm.errors import ProcessDiedError, ProcessError, StartupError
from ..shm.process import ChildProcess, ChildSpec, Spawner
from .observer import ProcessReport
from .supervision_events import ChildExited

log = logging.getLogger(__name__)

_HANG_UP_S = 1.0
"""Between the end of a lifeline and that of its process."""


class Children(Mapping[str, ChildProcess]):
    """See above. Each is registered in `selector`, with itself as data, until `unwatch`.

    kill_wait_s: for one that let go of its lifeline and does not end by itself
    """

    def __init__(self, selector: selectors.BaseSelector, *, kill_wait_s: float) -> None:
        self._selector = selector
        self._kill_wait_s = kill_wait_s
        self._spawner = Spawner("supervisor")
        self._children: dict[str, ChildProcess] = {}
        self._spawned_at: dict[str, float] = {}
        self._ready_after_s: dict[str, float] = {}

    def __getitem__(self, role: str) -> ChildProcess:
        return self._children[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._children)

    def __len__(self) -> int:
        return len(self._children)

    def start(self) -> None:
        """Get ready to spawn."""
        self._spawner.start()

    def spawn(self, role: str, spec: ChildSpec) -> None:
        """Start the process of a role: the first one, or another. Raises StartupError when it cannot be started."""
        previous = self._children.get(role)
        if previous is not None:
            previous.close()
        child = self._spawner.spawn(spec)
        self._children[role] = child
        self._spawned_at[role] = time.monotonic()
        self._selector.register(child.lifeline_fd, selectors.EVENT_READ, child)

    def is_ready(self, role: str) -> None:
        """Note that the process of a role serves."""
        self._ready_after_s[role] = time.monotonic() - self._spawned_at[role]

    def terminate(self, roles: Iterable[str]) -> None:
        """Ask them to leave. Those without a process are passed over."""
        for role in roles:
            if role in self._children:
                self._children[role].terminate()

    def kill(self, roles: Iterable[str]) -> None:
        """End them at once. Those without a process are passed over."""
        for role in roles:
            if role in self._children:
                self._children[role].kill()

    def unwatch(self, child: ChildProcess) -> None:
        """Hear of it no more. Call it when its lifeline has ended."""
        self._selector.unregister(child.lifeline_fd)

    def exited(self, child: ChildProcess, killed_because: str | None) -> ChildExited:
        """Wait for the process whose lifeline has ended; say how, and why. killed_because: why we have killed it."""
        # One that closed its lifeline and lives on is no use to anyone.
        if child.wait(_HANG_UP_S) is None:
            child.kill()
            child.wait(self._kill_wait_s)
        error_type = StartupError if child.ready is None else ProcessDiedError
        if child.failure is not None and child.failure.traceback:
            log.error("%s failed:\n%s", child.role, child.failure.traceback)
        config_field = child.failure.config_field if child.failure else None
        problem = child.failure.error if child.failure and config_field else str(child.death(error_type))
        return ChildExited(
            role=child.role,
            problem=problem if killed_because is None else f"{child.role} was killed: {killed_because}",
            exitcode=child.exitcode or 0,
            is_config_error=config_field is not None,
            at=time.monotonic(),
        )

    def drop(self, role: str) -> None:
        """Forget a role for good. It has ended."""
        self._children.pop(role).close()

    def end_all(self) -> None:
        """Kill and reap whoever is left, and end the spawner."""
        self.kill(self._children)
        for child in self._children.values():
            try:
                child.stop(reason="supervisor leaves", timeout_s=0)
            except ProcessError as error:
                # In a call that the kernel does not break off. The others are not to wait for it.
                log.error("%s", error)
        self._spawner.close()

    def reports(self) -> tuple[ProcessReport, ...]:
        """Say of each when it was ready."""
        return tuple(
            ProcessReport(role=role, pid=child.pid, ready_after_s=self._ready_after_s[role])
            for role, child in self._children.items()
        )
