"""A benchmark's result: tables, with all that one needs to trust or repeat them.

Called by: every benchmark, when it has measured. Writes `STEM.json` (everything) and `STEM.md` (for people), and
shows the tables on standard output.
"""

import datetime
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
from rich.console import Console
from rich.table import Table as RichTable

from .machine import Machine, read_machine, read_versions
from .stats import Spread

PROGRAM = "cluster-bench"
_PLAIN_WIDTH = 160
_SECRETS = ("--api-key",)


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """One table: the first column names the row, the rest are numbers as text. note: how to read it."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark's result.

    num_runs: repetitions; tables show medians over them
    runs:     what each run measured, as the benchmark structures it
    """

    benchmark: str
    command: str
    date: str
    machine: Machine
    versions: dict[str, str]
    num_runs: int
    tables: list[Table]
    notes: list[str]
    runs: Any


class ReportWriter:
    """Makes the report of one command. Made when the command begins: the machine's load is taken then.

    argv: the command's arguments; what is secret in them is not repeated
    stem: path without a suffix; None: nothing is written, only shown
    """

    def __init__(self, argv: Sequence[str], stem: Path | None) -> None:
        self._command = shlex.join([PROGRAM, *_publishable(argv)])
        self._stem = stem
        self._machine = read_machine()
        self._date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")

    def finish(
        self,
        *,
        benchmark: str,
        num_runs: int,
        tables: list[Table],
        runs: object,
        out: IO[str],
        notes: Sequence[str] = (),
        versions: dict[str, str] | None = None,
    ) -> Report:
        """Show the tables on `out`, and write both files when there is a stem.

        versions: of what was measured beside ours, added to our own. Returns the report.
        """
        report = Report(
            benchmark=benchmark,
            command=self._command,
            date=self._date,
            machine=self._machine,
            versions=read_versions() | (versions or {}),
            num_runs=num_runs,
            tables=tables,
            notes=list(notes),
            runs=runs,
        )
        show_report(report, out)
        if self._stem is not None:
            for path in write_report(report, self._stem):
                print(f"wrote {path}", file=out)
        return report


def write_report(report: Report, stem: Path) -> list[Path]:
    """Write STEM.json and STEM.md; return their paths. The folder is made."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    # A stem may hold a dot of its own, which `with_suffix` would cut.
    json_path, markdown_path = (stem.parent / f"{stem.name}{suffix}" for suffix in (".json", ".md"))
    json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    markdown_path.write_text(render_markdown(report), encoding="utf-8")
    return [json_path, markdown_path]


def render_markdown(report: Report) -> str:
    """Write the report as a page of markdown."""
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [
        f"# {report.benchmark}",
        "",
        f"- date: {report.date}",
        f"- command: `{report.command}`",
        f"- machine: {machine.cpu}, {machine.num_cores} cores, {machine.memory_bytes / 2**30:.1f} GiB, "
        f"{machine.kernel}; GPU: {', '.join(machine.gpus) or 'none'}; load before: {machine.load:.2f}",
        f"- versions: {versions}",
        f"- runs: {report.num_runs}; each number is the median over them, in brackets the lowest and the highest",
    ]
    lines += [f"- {note}" for note in report.notes]
    for table in report.tables:
        lines += ["", f"## {table.title}", ""]
        if table.note:
            lines += [table.note, ""]
        lines.append("| " + " | ".join(table.columns) + " |")
        lines.append("|---" + "|---:" * (len(table.columns) - 1) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join(lines) + "\n"


def show_report(report: Report, out: IO[str]) -> None:
    """Print the tables for people."""
    console = Console(file=out, width=None if out.isatty() else _PLAIN_WIDTH, highlight=False)
    for table in report.tables:
        shown = RichTable(title=table.title, title_justify="left", caption=table.note or None)
        for index, column in enumerate(table.columns):
            shown.add_column(column, justify="left" if index == 0 else "right")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown, markup=False)
    for note in report.notes:
        console.print(f"- {note}", markup=False)


def show_spread(spread: Spread) -> str:
    """Write a number over runs: the median, and the ends when they differ from it as shown."""
    median, low, high = (show_number(value) for value in (spread.median, spread.low, spread.high))
    return median if low == high else f"{median} [{low}-{high}]"


def show_number(value: float) -> str:
    """Write a number with three significant digits or more, never in powers of ten."""
    size = abs(value)
    if size >= 100 or value == 0:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def _publishable(argv: Sequence[str]) -> list[str]:
    """Return the arguments without secrets and without the name of the home folder."""
    home, shown, is_secret = str(Path.home()), [], False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if is_secret:
            shown.append("***")
        elif name in _SECRETS and equals:
            shown.append(f"{name}=***")
        else:
            shown.append(argument.replace(home, "~"))
        is_secret = argument in _SECRETS
    return shown
