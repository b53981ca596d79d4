"""How far a benchmark is: a bar on a terminal, plain lines elsewhere; always on standard error.

Called by: every benchmark, one thread. The bar is drawn when the benchmark says something, never by a thread of its
own, which would run into what is being measured.
"""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Counts `total` units. A context manager."""

    def __init__(self, title: str, total: int) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._total = total
        self._num_done = 0
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            auto_refresh=False,
            disable=not self._is_terminal,
        )
        self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Say what is being done."""
        if self._is_terminal:
            self._bar.update(self._task, description=text, refresh=True)
        else:
            print(f"[{self._num_done}/{self._total}] {text}", file=sys.stderr, flush=True)

    def show(self, text: str) -> None:
        """As `say`, on a terminal only: for what changes often."""
        if self._is_terminal:
            self._bar.update(self._task, description=text, refresh=True)

    def advance(self, units: int = 1) -> None:
        """Count units as done; drawn with the next `say`."""
        self._num_done += units
        self._bar.update(self._task, advance=units)
