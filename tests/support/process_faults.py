"""Faults inside engine cores, coordinators and API servers (faults.py), which run no hooks.

A cluster that is started with `AT_START` on its path has them planted in each of these processes at its start.

    engine core  "admit" a request, "schedule" a step, take its "result", "send" outputs, in the thread for it
    coordinator  take a "report", "publish" a snapshot
    API server   "receive" outputs, on the event loop
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.faults import perhaps_fail

AT_START = Path(__file__).parent / "at_start"
CORE_MOMENTS = ("admit", "schedule", "result", "send")
COORDINATOR_MOMENTS = ("report", "publish")
SERVER_MOMENTS = ("receive",)


def plant(role: str) -> None:
    """Have this process, which is to be `role`, fail when it is asked to. Workers have hooks of their own."""

    def fail_before(owner: type, method: str, moment: str) -> None:
        original: Callable[..., Any] = getattr(owner, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            perhaps_fail(role, moment)
            return original(*args, **kwargs)

        setattr(owner, method, wrapped)

    if role == "coordinator":
        from phalanx.cluster.load_table import LoadTable

        fail_before(LoadTable, "report", "report")
        fail_before(LoadTable, "publish", "publish")
    elif role.startswith("api"):
        from phalanx.cluster.replay import ReplayLog

        fail_before(ReplayLog, "accept", "receive")
    elif role.startswith("dp") and " " not in role:
        from phalanx.engine.core_io import CoreOutput
        from phalanx.engine.scheduler import Scheduler

        fail_before(Scheduler, "add_request", "admit")
        fail_before(Scheduler, "schedule", "schedule")
        fail_before(Scheduler, "update_from_output", "result")
        fail_before(CoreOutput, "_send", "send")
