"""CaptureBar: how far the recording of CUDA graphs is, on a terminal.

Called by: UniprocExecutor; the ranks of a cluster have no terminal of their own.
"""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class CaptureBar:
    """A context manager. Nothing is shown before the first graph, or when standard error is no terminal."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("CUDA graphs"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            auto_refresh=False,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("", total=None, visible=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, done: int, total: int) -> None:
        """So many of so many graphs are recorded."""
        self._progress.update(self._task, completed=done, total=total, visible=True, refresh=True)
