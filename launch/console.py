"""What the operator sees while a cluster starts, serves and stops. Implements ClusterObserver.

Called by: the supervisor, in its thread. On a terminal the start is one live line that says what each process
is doing; elsewhere, each new phase is a plain line. Tables go to standard output, all else to standard error.
"""

from typing import IO

from rich.console import Console
from rich.status import Status

from ..cluster.observer import ClusterReport
from ..cluster.placement import Plan
from ..cluster.supervision_events import ClusterState
from ..shm.segment import SegmentPlan
from .tables import memory_table, plan_table, print_tables, processes_table, ranks_table, startup_table


class ConsoleObserver:
    """Tell the operator what happens. One thread."""

    def __init__(self, *, url: str, model_name: str, out: IO[str], err: IO[str]) -> None:
        self._url = url
        self._model_name = model_name
        self._out = out
        self._err = err
        self._phases: dict[str, str] = {}
        self._status: Status | None = None

    def planned(self, plan: Plan, memory: SegmentPlan) -> None:
        """Show the plans of ranks and of shared memory, before anything starts."""
        print_tables([plan_table(plan), memory_table(memory)], self._out)
        self._out.flush()
        if self._err.isatty():
            self._status = Status("starting", console=Console(file=self._err))
            self._status.start()

    def progress(self, role: str, phase: str) -> None:
        """Show that a process begins a phase."""
        if self._status is None:
            self._say(f"{role}: {phase}")
            return
        self._phases[role] = phase
        self._status.update("  ".join(f"{role} {phase}" for role, phase in sorted(self._phases.items())))

    def serving(self, report: ClusterReport) -> None:
        """Show the tables of a cluster that is ready, and where it listens."""
        self.close()
        print_tables(
            [processes_table(report.processes), startup_table(report.replicas), ranks_table(report.replicas)],
            self._out,
        )
        print(
            f"ready after {report.start_s:.1f} s: {self._model_name} at {self._url}",
            file=self._out,
            flush=True,
        )

    def problem(self, sentence: str) -> None:
        """Show what went wrong."""
        self.close()
        self._say(f"cluster-launch: {sentence}")

    def stopping(self, state: ClusterState) -> None:
        """Show that the cluster drains or stops."""
        self.close()
        what = (
            "finishing running requests; once more to stop at once"
            if state is ClusterState.DRAINING
            else "stopping"
        )
        self._say(f"cluster-launch: {what}")

    def close(self) -> None:
        """End the live line. Idempotent."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _say(self, line: str) -> None:
        print(line, file=self._err, flush=True)
