"""Faults at an exact moment, asked for by a file in the folder for temporary files, which is the cluster's own.

The process that is meant takes the file away and does what it says, once.
"""

import json
import os
import signal
import tempfile
from pathlib import Path

ACTIONS = ("kill", "stop", "raise", "exit")
EXIT_STATUS = 9


def fault_file(folder: Path) -> Path:
    """Where the fault that is asked for stands until it has happened."""
    return folder / "fault.json"


def ask_for_fault(folder: Path, *, role: str, moment: str, action: str) -> None:
    """Have a process ("dp0", "dp0 tp1") do something at its next moment of this kind."""
    half = folder / "half"
    half.write_text(json.dumps({"role": role, "moment": moment, "action": action}))
    half.replace(fault_file(folder))


def perhaps_fail(role: str, moment: str) -> None:
    """Called by the process `role` at each moment of a kind."""
    path = fault_file(Path(tempfile.gettempdir()))
    try:
        fault = json.loads(path.read_text())
    except FileNotFoundError:
        return
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
