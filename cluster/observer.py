"""What the supervisor tells of a cluster's start, life and end.

Called by: the supervisor, in its main thread; the command line prints it (launch/console.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ..workers.messages import ExecutorReport
from .supervision_events import ClusterState


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """One process that serves: its role, pid and seconds from its spawn until it was ready."""

    role: str
    pid: int
    ready_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """What the supervisor knows when everything serves. replicas: by dp_rank."""

    start_s: float
    processes: tuple[ProcessReport, ...]
    replicas: Mapping[int, ExecutorReport]


class ClusterObserver(Protocol):
    """Where the supervisor tells its story; the command line prints it. Called from the supervisor's thread."""

    def progress(self, role: str, phase: str) -> None:
        """A process, or a worker of one, begins a phase of its start."""

    def serving(self, report: ClusterReport) -> None:
        """Everything is ready."""

    def problem(self, sentence: str) -> None:
        """Something went wrong; what follows from it comes by itself."""

    def stopping(self, state: ClusterState) -> None:
        """The cluster drains or stops."""
