"""Targets that the process tests run in children, and ways to look at processes from outside."""

import contextlib
import ctypes
import gc
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from phalanx.shm.child_context import ChildContext
from phalanx.shm.errors import ConfigError

_LISTENING = "0A"


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str = "the condition") -> None:
    """Wait for a fact, with a deadline. The pause only spares the processor; no test depends on its length."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
        time.sleep(0.005)


def is_gone(pid: int) -> bool:
    """True when the process has ended. A zombie counts as gone: a container without init keeps orphans as such."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def listening_addresses(pids: Iterable[int]) -> set[tuple[str, str]]:
    """Where processes can be reached: (table, address) of /proc/net, "tcp" and "0100007F:1F90" for 127.0.0.1:8080."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                inodes.update(re.findall(r"^socket:\[(\d+)\]$", os.readlink(link)))
    listening = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            address, state, inode = fields[1], fields[3], fields[9]
            # Of a datagram socket every one that is bound can be sent to.
            if inode in inodes and (state == _LISTENING or table.startswith("udp")):
                listening.add((table, address))
    return listening


def echo(context: ChildContext) -> int:
    """Ready with its arguments; sends each message back as a note; leaves with 7 on a stop."""
    context.on_message(context.note)
    context.ready(context.args)
    context.stop_requested.wait()
    return 7


def tell_of_garbage_collection(context: ChildContext) -> int:
    """Ready with whether it goes on, and whether what was imported is out of its sight."""
    context.ready(f"{gc.isenabled()} {gc.get_freeze_count() > 0}".encode())
    return 0


def raise_before_ready(context: ChildContext) -> int:
    context.progress("weights")
    raise RuntimeError("no such tensor")


def raise_config_error(context: ChildContext) -> int:
    raise ConfigError("model.path", "is a joke")


def exit_before_ready(context: ChildContext) -> int:
    context.progress("device")
    os._exit(9)


def never_ready(context: ChildContext) -> int:
    context.progress("profile")
    signal.pause()
    return 0


def hold_the_interpreter(context: ChildContext) -> int:
    """Stand in a C function that keeps the interpreter's lock."""
    context.progress("profile")
    ctypes.PyDLL(None).sleep(60)
    return 0


def stop_within_the_wait(context: ChildContext) -> int:
    """Asks itself to stop at every line of the wait for that: the handler interrupts whatever holds a lock there."""
    context.ready(b"")

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        if event == "line":
            signal.raise_signal(signal.SIGTERM)
        return trace

    sys.settrace(trace)
    context.stop_requested.wait()
    sys.settrace(None)
    return 7


def raise_a_long_error(context: ChildContext) -> int:
    raise RuntimeError("\N{SNOWMAN}" * 40_000)


def double_messages(context: ChildContext) -> int:
    """Answers each message with a note that holds it twice."""
    context.on_message(lambda data: context.note(2 * data))
    context.ready(b"")
    context.stop_requested.wait()
    return 0


def choke_on_messages(context: ChildContext) -> int:
    """Takes none."""

    def refuse(data: bytes) -> None:
        raise ValueError("what is that?")

    context.on_message(refuse)
    context.ready(b"")
    context.stop_requested.wait()
    return 0


def ignore_stop(context: ChildContext) -> int:
    context.ready(b"")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context.note(b"deaf")
    while True:
        signal.pause()
