"""Tables for people: the plan of ranks, how long each rank took to start, what each rank is.

Called by: cli.py for --dry-run, runtime.py when a cluster is ready. Pure: plain rows in, rich tables out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from rich.console import Console
from rich.table import Table

from ..workers.config import DeviceType, ParallelConfig
from ..workers.messages import RankReport

PHASES = ("import", "device", "process group", "weights", "profile", "KV cache")
"""Phases of a rank's start that have a column of their own, in order; they are what workers report."""
PLAIN_WIDTH = 160
"""Columns when the output is no terminal, so that no row is folded in a log file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank that is ready. total_s: from its spawn until it was ready; None: the sum of its phases."""

    dp_rank: int
    report: RankReport
    total_s: float | None = None


def plan_table(parallel: ParallelConfig, data_parallel_size: int) -> Table:
    """Show which rank will use which device. `parallel.device` is CUDA or CPU."""
    table = Table(
        title=f"plan: tp {parallel.tensor_parallel_size} x dp {data_parallel_size}", title_justify="left"
    )
    for column in ("rank", "replica", "tp_rank", "device"):
        table.add_column(column, justify="left" if column in ("rank", "device") else "right")
    for dp_rank in range(data_parallel_size):
        for tp_rank in range(parallel.tensor_parallel_size):
            index = 0 if parallel.share_device else dp_rank * parallel.tensor_parallel_size + tp_rank
            device = "cpu" if parallel.device is DeviceType.CPU else f"cuda:{index}"
            table.add_row(f"dp{dp_rank} tp{tp_rank}", str(dp_rank), str(tp_rank), device)
    return table


def startup_table(rows: Sequence[RankRow]) -> Table:
    """Show the seconds that each phase of each rank's start took."""
    table = Table(title="start-up, seconds", title_justify="left")
    for column in ("rank", "pid", *PHASES, "total"):
        table.add_column(column, justify="left" if column == "rank" else "right")
    for row in _ordered(rows):
        spent: dict[str, float] = {}
        for phase in row.report.phases:
            spent[phase.name] = spent.get(phase.name, 0.0) + phase.duration_s
        total = sum(spent.values()) if row.total_s is None else row.total_s
        cells = [f"{spent[name]:.2f}" if name in spent else "-" for name in PHASES]
        table.add_row(_name(row), str(row.report.pid), *cells, f"{total:.2f}")
    return table


def ranks_table(rows: Sequence[RankRow]) -> Table:
    """Show what each rank runs on and what it holds."""
    table = Table(title="ranks", title_justify="left")
    for column in (
        "rank",
        "pid",
        "device",
        "dtype",
        "attention",
        "weights MiB",
        "KV blocks",
        "KV MiB",
        "threads",
    ):
        table.add_column(
            column, justify="left" if column in ("rank", "device", "dtype", "attention") else "right"
        )
    for row in _ordered(rows):
        report = row.report
        table.add_row(
            _name(row),
            str(report.pid),
            f"{report.device} {report.device_name}".strip(),
            report.dtype,
            report.attention_backend,
            f"{report.weight_bytes / (1 << 20):.1f}",
            str(report.num_kv_blocks),
            f"{report.num_kv_blocks * report.kv_bytes_per_block / (1 << 20):.1f}",
            str(report.num_threads),
        )
    return table


def print_tables(tables: Sequence[Table], file: IO[str]) -> None:
    """Write tables to `file`: in its width when it is a terminal, else without folding."""
    console = Console(file=file, width=None if file.isatty() else PLAIN_WIDTH, highlight=False)
    for table in tables:
        console.print(table)


def _name(row: RankRow) -> str:
    return f"dp{row.dp_rank} tp{row.report.tp_rank}"


def _ordered(rows: Sequence[RankRow]) -> list[RankRow]:
    return sorted(rows, key=lambda row: (row.dp_rank, row.report.tp_rank))
