"""ChildProcess: the only way this project starts a process, watches it and stops it.

Called by: the supervisor, engine cores (for their workers), `LLM` and `AsyncLLM`, in the parent. The child's
half is child.py. A child is a fresh interpreter (`python -m phalanx.shm.child`): nothing is forked, nothing
is pickled, and the user's `__main__` is not run again.

Between the two lies one socket pair, the *lifeline* (lifeline.py). It carries the child's typed arguments down as
its first message and whatever the parent sends later; up come `Progress`, `Ready`, `Failed` and `Note`. When the parent
is gone, by whatever signal, the child reads its end and leaves; when the child is gone, the parent reads the
end and its pidfd becomes readable. Nobody polls.

    NEW -> STARTING -> READY -> STOPPING -> EXITED(exitcode)
              |          |
              +--> EXITED (StartupError)   +--> EXITED (ProcessDiedError)
"""

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec

from .errors import ConfigError, ProcessError, QueueClosedError, StartupError
from .lifeline import Lifeline
from .stack_dump import StackPipe, is_stopped
from .stall import StallDetector

_BEFORE_FIRST_PHASE = "start"
_STACK_WAIT_S = 1.0
_SEND_TIMEOUT_S = 5.0
"""For a child to read what it is told. It has a thread for that, so one that leaves hundreds of kilobytes unread for
longer stands still, and its parent must not stand still with it."""
_KILL_WAIT_S = 5.0
"""After SIGKILL, for the kernel to end the process: only a process in an uninterruptible call takes longer."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The child begins a phase of its start. at: `time.monotonic()`."""

    phase: str
    at: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The child serves from now on."""

    payload: bytes


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The child is about to leave because of an error.

    error: one sentence; traceback: for the log; config_field: set when it was a ConfigError
    """

    error: str
    traceback: str
    config_field: str | None = None


class Note(msgspec.Struct, frozen=True, tag="note"):
    """Anything else the child has to say; its role defines the payload."""

    payload: bytes


ChildMessage = Progress | Ready | Failed | Note


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to start.

    role:     its name in logs, tables and the process title ("dp0 tp1")
    target:   "module:function" that takes a ChildContext and returns an exit code
    args:     encoded arguments, decoded by the target
    rank:     carried into errors
    pass_fds: descriptors the child inherits under the same numbers
    env:      added to our environment
    """

    role: str
    target: str
    args: bytes
    rank: int | None = None
    pass_fds: tuple[int, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class Spawner:
    """Starts children from one thread of its own.

    The kernel sends a child its parent-death signal when the *thread* that started it ends. A caller's thread
    may be short-lived, so every start happens in a thread that lives until `close()`. Close it only after all
    its children were stopped: the ones that are left are killed by that signal.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Start the thread. Idempotent."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"spawner-{self._name}")

    def spawn(self, spec: ChildSpec) -> "ChildProcess":
        """Start one child and return at once; `wait_all_ready` waits. Raises StartupError when it cannot start."""
        assert self._thread is not None, "start() first"
        return self._thread.submit(_start, spec).result()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None


class ChildProcess:
    """One child as its parent sees it. Made by `Spawner.spawn`.

    Thread: one owner calls `receive`, `stop` and `close`; `send` and `kill` may be called from any thread.
    """

    def __init__(
        self,
        spec: ChildSpec,
        process: "subprocess.Popen[bytes]",
        lifeline: Lifeline,
        stack_pipe: StackPipe,
    ) -> None:
        self.role = spec.role
        self.rank = spec.rank
        self.pid = process.pid
        # Opened before anyone can have reaped the child, so it can only mean this process.
        self.pidfd = os.pidfd_open(process.pid)
        self.last_phase = _BEFORE_FIRST_PHASE
        self.failure: Failed | None = None
        self.ready: Ready | None = None
        self._process = process
        self._lifeline = lifeline
        self._stack_pipe = stack_pipe
        self._decoder = msgspec.msgpack.Decoder(ChildMessage)
        self._is_closed = False

    @property
    def lifeline_fd(self) -> int:
        """Readable when there is a message or the child is gone."""
        return self._lifeline.fileno()

    @property
    def has_hung_up(self) -> bool:
        """True when `receive` has met the end of the lifeline: the child is gone, and has said its last."""
        return self._lifeline.has_ended

    @property
    def exitcode(self) -> int | None:
        """None while it lives; negative: the signal that ended it."""
        return self._process.poll()

    def receive(self) -> list[ChildMessage]:
        """Take all messages that have arrived; never blocks. See `has_hung_up`."""
        messages: list[ChildMessage] = []
        while (data := self._lifeline.receive_arrived()) is not None:
            message = self._decoder.decode(data)
            match message:
                case Progress():
                    self.last_phase = message.phase
                case Ready():
                    self.ready = message
                case Failed():
                    self.failure = message
                case Note():
                    pass
            messages.append(message)
        return messages

    def send(self, payload: bytes) -> None:
        """Send bytes to the child's `on_message`, as many as there are. Any thread.

        Raises QueueClosedError when the child is gone. One that does not read, and has left no room for some seconds,
        is killed, and counts as gone.
        """
        try:
            self._lifeline.send(payload, _SEND_TIMEOUT_S)
        except TimeoutError:
            self.failure = self.failure or Failed("it does not read what it is told", "")
            self.kill()
            raise QueueClosedError(f"{self.role} does not read what it is told, and was killed") from None
        except OSError as error:
            raise QueueClosedError(f"{self.role} is gone: {error}") from None

    def death(self, error_type: type[ProcessError]) -> ProcessError:
        """Describe why the child is gone, with all that it said before. Call `receive()` first."""
        detail = self.failure.error if self.failure else f"last phase: {self.last_phase}"
        return error_type(self.role, rank=self.rank, exitcode=self.exitcode, detail=detail)

    def stack(self) -> str:
        """Return the Python stacks of the child's threads, or in one line why there are none.

        Blocks up to a second, while the child goes on. One thread at a time.
        """
        if is_stopped(self.pid):
            return "(stopped by a signal: no stack)"
        if self._is_closed or self.last_phase == _BEFORE_FIRST_PHASE:
            # Before it is armed, the signal would end the child.
            return "(no stack: the process is not armed yet, or is gone)"
        return self._stack_pipe.request(self.pidfd, _STACK_WAIT_S) or "(the process does not answer)"

    def kill(self) -> None:
        """Send SIGKILL. Does not wait; `stop` or `close` reaps. No effect once it is closed."""
        if self._is_closed:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM: a ready child finishes what its role defines, one that is not ready yet just ends."""
        if self._is_closed:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the child's end; None when the time passed."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        if not poller.poll(max(0.0, timeout_s) * 1000):
            return self.exitcode
        return self._process.wait()

    def stop(self, *, reason: str, timeout_s: float) -> int:
        """Ask, wait, kill, reap; done within `timeout_s` + 5 s. Idempotent. Returns the exit code.

        reason ends in the error when even SIGKILL does not end it (a process in an uninterruptible call).
        """
        if self.exitcode is None:
            self.terminate()
            if self.wait(timeout_s) is None:
                self.kill()
                if self.wait(_KILL_WAIT_S) is None:
                    raise ProcessError(self.role, rank=self.rank, detail=f"survived SIGKILL ({reason})")
        exitcode = self._process.wait()
        self.close()
        return exitcode

    def close(self) -> None:
        """Let go of the descriptors. A child that still lives sees its parent gone, and leaves. Idempotent."""
        if not self._is_closed:
            self.receive()
            self._is_closed = True
            self._lifeline.close()
            self._stack_pipe.close()
            os.close(self.pidfd)


def wait_all_ready(
    children: Sequence[ChildProcess],
    deadline: float,
    on_message: Callable[[ChildProcess, ChildMessage], None] | None = None,
    *,
    stall_report_s: float = math.inf,
    on_stall: Callable[[Sequence[ChildProcess]], None] | None = None,
) -> list[bytes]:
    """Wait until every child is ready; return their payloads in order.

    deadline: `time.monotonic()` instant. Raises StartupError for the first child that failed or ended, or, at the
    deadline, for all that are missing with the phase each is in; ConfigError when a child failed with one.
    on_stall: told who is missing, once no child has said anything for `stall_report_s`, then each time after twice
    as long, and at the deadline.
    """
    stall = StallDetector(stall_report_s, time.monotonic())
    waiting = {child.lifeline_fd: child for child in children if child.ready is None}
    poller = select.poll()
    for fd in waiting:
        poller.register(fd, select.POLLIN)
    while waiting:
        wake_at = min(deadline, stall.next_report_at)
        events = poller.poll(max(0.0, wake_at - time.monotonic()) * 1000)
        now = time.monotonic()
        if events:
            stall.restart(now)
        elif on_stall is not None and (stall.is_due(now) or now >= deadline):
            on_stall(list(waiting.values()))
        if not events and now >= deadline:
            missing = ", ".join(f"{child.role} (in {child.last_phase})" for child in waiting.values())
            raise StartupError(missing, detail="not ready before the deadline")
        for fd, _ in events:
            child = waiting[fd]
            messages = child.receive()
            for message in messages:
                if on_message is not None:
                    on_message(child, message)
            if child.failure is not None:
                child.wait(_KILL_WAIT_S)  # it is on its way out: its own exit code says more than our signal
                if child.failure.config_field is not None:
                    prefix = f"{child.failure.config_field}: "
                    raise ConfigError(child.failure.config_field, child.failure.error.removeprefix(prefix))
                raise child.death(StartupError)
            if child.ready is not None:
                poller.unregister(fd)
                del waiting[fd]
            elif child.has_hung_up:
                child.wait(_KILL_WAIT_S)  # the lifeline ended, so the process is ending too
                raise child.death(StartupError)
    return [child.ready.payload for child in children if child.ready is not None]


def _start(spec: ChildSpec) -> ChildProcess:
    try:
        with ExitStack() as undo:
            child = _start_process(spec, undo)
            undo.pop_all()
    # No memory, no descriptor, no process to be had; or no interpreter any more.
    except OSError as error:
        raise StartupError(spec.role, rank=spec.rank, detail=str(error)) from error
    return child


def _start_process(spec: ChildSpec, undo: ExitStack) -> ChildProcess:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    undo.callback(ours.close)
    with theirs:
        stack_pipe = StackPipe()
        undo.callback(stack_pipe.close)
        numbers = (theirs.fileno(), stack_pipe.write_fd, os.getpid())
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.shm.child", *map(str, numbers), spec.role, spec.target],
            pass_fds=(theirs.fileno(), stack_pipe.write_fd, *spec.pass_fds),
            env={**os.environ, **spec.env, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.DEVNULL,
            # A group of its own: Ctrl-C in a terminal reaches the top process alone, which decides.
            process_group=0,
        )
    stack_pipe.close_write_end()
    undo.callback(process.wait)
    undo.callback(process.kill)
    lifeline = Lifeline(ours)
    child = ChildProcess(spec, process, lifeline, stack_pipe)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died already: its waiter will see
        lifeline.send(spec.args)
    return child
