"""A baseline in an interpreter of its own: started once, asked for one measurement after the other.

Called by: the benchmarks that compare with other software. Its code lies as text in peers/, outside the package's
rules: a baseline may fork, or import what the package must not. It is no ChildProcess, since that runs this
package's modules. When it dies: `ask` raises BenchError with the end of what it printed. When this process dies:
the kernel kills the baseline. What it leaves in the temporary or the cache folder lies in a folder of its own, which
goes with it.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .errors import BenchError

PEERS = Path(__file__).resolve().parent / "peers"
_MAX_SHOWN = 2000


class PeerProcess:
    """One baseline. A context manager; one thread.

    python:  interpreter, of an environment that has what the baseline needs
    script:  file in peers/; its arguments are `arguments` and our pid
    env:     added to our environment
    """

    def __init__(
        self, name: str, python: str, script: str, arguments: Sequence[str], *, env: Mapping[str, str]
    ) -> None:
        self.name = name
        self.versions: dict[str, str] = {}
        self._command = [python, "-I", str(PEERS / script), *arguments, str(os.getpid())]
        self._env = env
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile()
        self._folder = tempfile.TemporaryDirectory(prefix="cluster-bench-")

    def __enter__(self) -> Self:
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env={
                    **os.environ,
                    **self._env,
                    "TMPDIR": self._folder.name,
                    "XDG_CACHE_HOME": self._folder.name,
                },
                process_group=0,
            )
            self.versions = self._receive()["versions"]
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise BenchError(f"{self.name} does not start: {error}") from None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, command: Mapping[str, object]) -> Any:
        """Have one measurement made; returns its result. Blocks until it is there. Raises BenchError."""
        assert self._process is not None, "enter first"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BenchError(f"{self.name} ended: {self._last_words()}") from None
        answer = self._receive()
        if "error" in answer:
            raise BenchError(f"{self.name} failed: {answer['error'][-_MAX_SHOWN:]}")
        return answer["result"]

    def close(self) -> None:
        """End it. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
        self._errors.close()
        self._folder.cleanup()

    def _receive(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise BenchError(f"{self.name} ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-_MAX_SHOWN:].strip() or "it said nothing"
