"""Stack dumps: where the threads of a child stand, asked from outside.

Called by: child.py arms its process before it imports anything slow; process.py asks. faulthandler answers from
within the signal handler, in C: it needs neither the interpreter's lock nor the main thread, and so works while
that thread stands in a call into a library. A process that is stopped, or in an uninterruptible call, does not
answer.

When the child dies: the pipe ends, and `request` returns what has come.
"""

import errno
import faulthandler
import os
import select
import signal
from pathlib import Path

STACK_SIGNAL = signal.SIGRTMIN + 5
"""Nobody else's: SIGUSR1 and SIGUSR2 belong to the libraries and profilers that a worker may load."""
_SETTLE_S = 0.05
"""A dump has no end mark: it is over when nothing more has come for so long."""
_MAX_BYTES = 64 << 10


def arm_stack_dump(fd: int) -> None:
    """Write the Python stacks of all threads into `fd` at each STACK_SIGNAL, from now on."""
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)


def process_state(pid: int) -> str:
    """Return the kernel's letter for what a process does ("R", "S", "D", "T", "Z", ...); "" when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name in parentheses may hold anything, parentheses too.
    return stat.rpartition(")")[2].split()[0]


def is_stopped(pid: int) -> bool:
    """True when the process stands still by SIGSTOP or a debugger."""
    return process_state(pid) in ("T", "t")


class StackPipe:
    """The pipe through which one child's stacks come. Owner: its `ChildProcess`; one thread at a time.

    write_fd: to be inherited by the child. A pipe that nobody empties swallows what does not fit: the child must
              never wait inside its signal handler
    """

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def close_write_end(self) -> None:
        """Let go of the child's end, once the child has it. Idempotent."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def request(self, pidfd: int, timeout_s: float) -> str:
        """Ask the armed process of `pidfd`, and return what it writes; "" when it does not answer.

        Blocks at most `timeout_s` until the dump begins, then until it has come.
        """
        self._read()
        try:
            signal.pidfd_send_signal(pidfd, STACK_SIGNAL)
        except ProcessLookupError:
            return ""
        poller = select.poll()
        poller.register(self._read_fd, select.POLLIN)
        dump = b""
        wait_s = timeout_s
        while len(dump) < _MAX_BYTES and poller.poll(wait_s * 1000):
            piece = self._read()
            if not piece:
                break
            dump += piece
            wait_s = _SETTLE_S
        return dump.decode("utf-8", errors="replace").strip()

    def close(self) -> None:
        """Let go of both ends. Idempotent."""
        self.close_write_end()
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1

    def _read(self) -> bytes:
        """Take what has come; empty when there is nothing, or the child is gone."""
        try:
            return os.read(self._read_fd, _MAX_BYTES)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            return b""
