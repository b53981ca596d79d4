"""A cluster that a benchmark starts as its operator would, looks at from outside, and stops.

Called by: startup.py, failover.py, torture.py, multi_gpu_dp.py, routing/real.py. One thread. When it does not start or
stop: BenchError with its last words. It is killed when the benchmark leaves in any other way, and its processes go
with it.
"""

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from .errors import BenchError

STOP_TIMEOUT_S = 60.0
_MAX_LAST_WORDS = 2000
_READY = re.compile(r"^ready after [\d.]+ s: .* at (http://\S+)$")
_TITLE = "phalanx "


class LaunchedCluster:
    """One running `cluster-launch`. A context manager: it is ready inside.

    launch:  arguments of cluster-launch
    lines:   of its standard output, up to the one that says that it is ready
    ready_s: from running the command until it said so
    """

    def __init__(self, launch: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "phalanx.launch", "--port", "0", *launch]
        self.lines: list[str] = []
        self.ready_s = 0.0
        self.url = ""

    def __enter__(self) -> Self:
        self._errors = tempfile.NamedTemporaryFile("w+", suffix=".log")
        began_at = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # A session of its own: Ctrl-C reaches the cluster from here, once, and not from the terminal as well.
            start_new_session=True,
        )
        try:
            assert self._process.stdout is not None
            self.lines = _read_until_ready(self._process.stdout)
            self.ready_s = time.monotonic() - began_at
            found = _READY.match(self.lines[-1]) if self.lines else None
            if found is None:
                code = self._process.wait(STOP_TIMEOUT_S)
                raise BenchError(f"cluster-launch ended with {code}: {self.said()[-_MAX_LAST_WORDS:]}")
            self.url = found.group(1)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def is_running(self) -> bool:
        """True while `cluster-launch` itself is there."""
        return self._process.poll() is None

    def said(self, since: int = 0) -> str:
        """Return its standard error from character `since` on."""
        return Path(self._errors.name).read_text(encoding="utf-8", errors="replace")[since:]

    def pids(self) -> dict[str, int]:
        """Name its processes, by their role ("dp0 tp1"); the supervisor is "supervisor"."""
        roles = {"supervisor": self._process.pid}
        for pid in _tree(self._process.pid):
            try:
                title = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").rstrip("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if title.startswith(_TITLE):
                roles[title.removeprefix(_TITLE)] = pid
        return roles

    def memory_bytes(self) -> int:
        """Return the proportional set size of all its processes together."""
        return sum(map(proportional_size, [self._process.pid, *_tree(self._process.pid)]))

    def stop(self) -> float:
        """Stop it with Ctrl-C; return the seconds that it took. Raises BenchError."""
        began_at = time.monotonic()
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise BenchError(f"cluster-launch did not stop within {STOP_TIMEOUT_S:g} s") from None
        return time.monotonic() - began_at

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
        elif self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


def proportional_size(pid: int) -> int:
    """Return a process's proportional set size in bytes; 0 when it is gone."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024


def _tree(pid: int) -> Iterable[int]:
    """Yield all descendants of a process."""
    todo = [pid]
    while todo:
        for children in Path(f"/proc/{todo.pop()}").glob("task/*/children"):
            try:
                found = [int(word) for word in children.read_text(encoding="ascii").split()]
            except (FileNotFoundError, ProcessLookupError):
                continue
            yield from found
            todo += found


def _read_until_ready(output: IO[str]) -> list[str]:
    """Return the lines up to the one that says that the cluster serves; all of them when it ends instead."""
    lines = []
    for line in output:
        lines.append(line.rstrip("\n"))
        if _READY.match(line):
            break
    return lines
