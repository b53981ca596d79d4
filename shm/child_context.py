"""What a child process knows of its parent: arguments, messages both ways, the wish to stop.

Called by: child.py, which makes the one `ChildContext` of the process and hands it to the target. The thread
`lifeline` reads the parent's messages, and ends the process when the parent is gone, or when a message can't be taken:
a child that does not hear its parent any more is of no use to it.
"""

import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback as traceback_module
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType, ModuleType

import msgspec
import setproctitle

from .errors import ConfigError
from .exit_codes import ExitCode
from .lifeline import Lifeline
from .logs import configure_logging
from .process import ChildMessage, Failed, Note, Progress, Ready

log = logging.getLogger(__name__)

_MAX_TEXT = 32 << 10
"""Characters of an error or a traceback that are sent. The end says the most."""


class StopFlag:
    """Set once, by a signal's handler.

    Not a `threading.Event`: its lock may be held, by the very thread that the handler interrupts, in `wait`.
    """

    def __init__(self) -> None:
        self._is_set = False
        # Its `put` may interrupt itself, and its `get`.
        self._bell: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """True once a stop is asked."""
        return self._is_set

    def set(self) -> None:
        """Ask for a stop. May be called from a signal's handler."""
        self._is_set = True
        self._bell.put(None)

    def wait(self) -> None:
        """Wait until it is set."""
        self._bell.get()
        self._bell.put(None)


class ChildContext:
    """The child's end of the lifeline.

    args:           the encoded arguments
    stop_requested: set by SIGTERM once the child is ready
    """

    def __init__(self, lifeline: Lifeline, role: str, args: bytes) -> None:
        self.role = role
        self.args = args
        self.stop_requested = StopFlag()
        self.is_ready = False
        self._lifeline = lifeline
        self._lock = threading.Lock()
        self._handler: Callable[[bytes], None] | None = None
        self._early_messages: list[bytes] = []
        self._stop_callbacks: list[Callable[[], None]] = []

    def progress(self, phase: str) -> None:
        """Say that a phase of the start begins."""
        self._send(Progress(phase, time.monotonic()))

    def ready(self, payload: bytes) -> None:
        """Say that the child serves. From now on SIGTERM asks instead of ending. Main thread only."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self.is_ready = True
        self._send(Ready(payload))

    def note(self, payload: bytes) -> None:
        """Say anything else; the role defines the payload. At most 128 KiB."""
        self._send(Note(payload))

    def failed(self, error: str, traceback: str = "", config_field: str | None = None) -> None:
        """Say why the process is about to leave: one sentence, and a traceback for the log."""
        self._send(Failed(error[-_MAX_TEXT:], traceback[-_MAX_TEXT:], config_field))

    def on_message(self, handler: Callable[[bytes], None]) -> None:
        """Have the parent's messages delivered, in order, from the lifeline thread. Early ones are kept for it."""
        with self._lock:
            for message in self._early_messages:
                handler(message)
            self._early_messages.clear()
            self._handler = handler

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call back, in the main thread's signal handler, when a stop is asked: set an event, ring a bell, no more."""
        self._stop_callbacks.append(callback)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self.stop_requested.set()
        for callback in self._stop_callbacks:
            callback()

    def _send(self, message: ChildMessage) -> None:
        try:
            self._lifeline.send(msgspec.msgpack.encode(message))
        except OSError:  # the parent is gone; the lifeline thread is ending this process
            log.debug("message to the parent is lost role=%s", self.role)

    def serve_lifeline(self) -> None:
        """Read until the parent is gone, then end the process. The body of the lifeline thread."""
        try:
            while (data := self._lifeline.receive()) is not None:
                with self._lock:
                    if self._handler is None:
                        self._early_messages.append(data)
                    else:
                        self._handler(data)
        # The top of a thread.
        except Exception as error:
            text = traceback_module.format_exc()
            self.failed(f"a message of the parent was not taken: {type(error).__name__}: {error}", text)
            sys.stderr.write(text)
            os._exit(ExitCode.FAILED)
        os._exit(ExitCode.PARENT_GONE)


def import_for_good(module: str) -> ModuleType:
    """Import what stays as long as the process.

    Nothing of it is garbage, so nobody looks for some: not while it comes, which saves a tenth of the time, and not
    later, when a look through all modules would hold up whoever waits for an answer.
    """
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def run_target(lifeline_fd: int, role: str, target: str) -> int:
    """Take the arguments, import `target` by its name ("module:function") and run it."""
    lifeline = Lifeline(socket.socket(fileno=lifeline_fd))
    args = lifeline.receive()
    if args is None:
        return ExitCode.PARENT_GONE
    setproctitle.setproctitle(f"phalanx {role}")
    configure_logging(role)
    context = ChildContext(lifeline, role, args)
    threading.Thread(target=context.serve_lifeline, name="lifeline", daemon=True).start()
    # The top of a process: whatever went wrong is told to the parent, once, and becomes an exit code.
    try:
        context.progress("import")
        module, _, function = target.partition(":")
        return int(getattr(import_for_good(module), function)(context))
    except ConfigError as error:
        context.failed(str(error), config_field=error.field)
        return ExitCode.BAD_CONFIG
    except Exception as error:
        text = traceback_module.format_exc()
        context.failed(f"{type(error).__name__}: {error}", text)
        if context.is_ready:
            sys.stderr.write(text)
        return ExitCode.FAILED if context.is_ready else ExitCode.BOOT_FAILED
