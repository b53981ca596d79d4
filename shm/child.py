"""The first thing that runs in every child process: `python -m phalanx.shm.child FD STACK_FD PARENT_PID ROLE TARGET`.

Started by process.py only. Order matters: the child arms its own death with its parent's before it does
anything that can take long (imports, loading). Two ways, since each has a gap: the kernel's parent-death
signal does not cover a parent that died before it was armed (hence the second look at the parent's pid), and
the lifeline's end needs a thread that gets to run. Next it arms its stack dumps, so that the parent can ask where
it stands from the first import on.

Until the target says that it is ready, SIGTERM ends the process at once, for there is nothing to finish yet;
from then on it sets `stop_requested`. SIGINT is ignored: Ctrl-C is the top process's business.
"""

import ctypes
import os
import signal
import sys

from .exit_codes import ExitCode
from .stack_dump import arm_stack_dump

_PR_SET_PDEATHSIG = 1


def _arm_parent_death(parent_pid: int) -> None:
    """Have the kernel kill us when the parent's spawning thread ends, however it went."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(ExitCode.PARENT_GONE)


def main(argv: list[str]) -> int:
    """Arm, read the arguments, import the target, run it. Returns its exit code."""
    lifeline_fd, stack_fd, parent_pid = (int(number) for number in argv[:3])
    role, target = argv[3:5]
    _arm_parent_death(parent_pid)
    arm_stack_dump(stack_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Only now what takes time to import.
    from .child_context import run_target

    return run_target(lifeline_fd, role, target)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # The target has closed what must be closed. Tearing down an interpreter that holds torch takes up to two
    # seconds more, which a stop, and every restart, would wait for.
    os._exit(exit_code)
