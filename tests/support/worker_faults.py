"""Faults inside real workers, at an exact moment: named in `executor.hooks`, so that every worker imports it.

A test asks for one fault by a file in the folder for temporary files, which is the cluster's own; the rank that is
meant takes the file away and does what it says, once. A token that kills whoever computes it needs no file.
"""

import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.workers.shm_group import ShmGroup
from phalanx.workers.worker import Worker
from phalanx.workers.worker_loop import WorkerLike

HOOK = "support.worker_faults:with_faults"
POISON_TOKEN_ID = 509
MOMENTS = ("prefill", "decode", "collective")
ACTIONS = ("kill", "stop", "raise", "exit")
EXIT_STATUS = 9


def fault_file(folder: Path) -> Path:
    """Where the fault that is asked for stands until it has happened."""
    return folder / "fault.json"


def ask_for_fault(folder: Path, *, role: str, moment: str, action: str) -> None:
    """Have a worker ("dp0 tp1") do something at its next moment of this kind."""
    half = folder / "half"
    half.write_text(json.dumps({"role": role, "moment": moment, "action": action}))
    half.replace(fault_file(folder))


def with_faults(worker: WorkerLike, argument: None) -> None:
    """Nothing: that this module is imported is all that is wanted."""


def _perhaps(moment: str) -> None:
    path = fault_file(Path(tempfile.gettempdir()))
    try:
        fault = json.loads(path.read_text())
    except FileNotFoundError:
        return
    role = Path("/proc/self/cmdline").read_text().rstrip("\0").removeprefix("phalanx ")
    if (fault["role"], fault["moment"]) != (role, moment):
        return
    path.unlink()
    match fault["action"]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise RuntimeError("a planted fault")
        case "exit":
            os._exit(EXIT_STATUS)


def _wrap_begin_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def begin_step(self: Worker, scheduled: Any, *rest: Any) -> Any:
        if any(POISON_TOKEN_ID in new.token_ids for new in scheduled.new_requests):
            os._exit(EXIT_STATUS)
        _perhaps("prefill" if scheduled.new_requests else "decode")
        return original(self, scheduled, *rest)

    return begin_step


def _wrap_all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_reduce(self: ShmGroup, x: Any) -> Any:
        _perhaps("collective")
        return original(self, x)

    return all_reduce


# In worker processes only: the tests themselves import this module for its names.
if Path("/proc/self/cmdline").read_text().startswith("phalanx "):
    Worker.begin_step = _wrap_begin_step(Worker.begin_step)  # type: ignore[method-assign]
    ShmGroup.all_reduce = _wrap_all_reduce(ShmGroup.all_reduce)  # type: ignore[method-assign]
