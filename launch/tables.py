"""Tables for people: the plans of ranks and shared memory, how long each process took to start, what each rank is.

Called by: cli.py for --dry-run, console.py when a cluster is ready. Pure: plain values in, rich tables out.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from rich.console import Console
from rich.table import Table

from ..cluster.observer import ProcessReport
from ..cluster.placement import Plan
from ..shm.segment import SegmentPlan
from ..workers.messages import ExecutorReport, RankReport

PHASES = ("import", "device", "process group", "weights", "kernels", "profile", "KV cache")
"""Phases of a rank's start that have a column of their own, in order; they are what workers report."""
BESIDE = ("weights", "kernels")
"""Of these, those that go on at the same time: the longer one counts."""
PLAIN_WIDTH = 160
"""Columns when the output is no terminal, so that no row is folded in a log file."""

_RANK_PREFIX = re.compile(r"^dp\d+ (tp\d+ )?")


def plan_table(plan: Plan) -> Table:
    """Show which rank will use which device."""
    title = f"plan: tp {plan.tensor_parallel_size} x dp {plan.data_parallel_size}"
    table = _table(title, ("rank", "host", "device"), ("threads",))
    for rank in plan.ranks:
        table.add_row(rank.role, rank.host, rank.device, str(rank.num_threads))
    return table


def memory_table(memory: SegmentPlan) -> Table:
    """Show how much shared memory will be reserved, and what for; like segments of all ranks in one row."""
    sizes: dict[str, list[int]] = {}
    for segment in memory.segments:
        sizes.setdefault(_RANK_PREFIX.sub("", segment.name), []).append(segment.num_bytes)
    table = _table("shared memory", ("for",), ("segments", "MiB"))
    for name, each in sizes.items():
        table.add_row(name, str(len(each)), _mebibytes(sum(each)))
    table.add_row("all", str(len(memory.segments)), _mebibytes(memory.total_bytes))
    return table


def processes_table(processes: Sequence[ProcessReport]) -> Table:
    """Show each process of the cluster but the workers, and the seconds until it was ready."""
    table = _table("processes", ("process",), ("pid", "ready after s"))
    for process in processes:
        table.add_row(process.role, str(process.pid), f"{process.ready_after_s:.2f}")
    return table


def startup_table(replicas: Mapping[int, ExecutorReport]) -> Table:
    """Show the seconds that each phase of each rank's start took."""
    table = _table("start-up, seconds", ("rank",), ("pid", *PHASES, "total"))
    for role, report in _ranks(replicas):
        spent: dict[str, float] = {}
        for phase in report.phases:
            spent[phase.name] = spent.get(phase.name, 0.0) + phase.duration_s
        cells = [f"{spent[name]:.2f}" if name in spent else "-" for name in PHASES]
        longest = max(spent.get(name, 0.0) for name in BESIDE)
        total = longest + sum(spent.get(name, 0.0) for name in PHASES if name not in BESIDE)
        table.add_row(role, str(report.pid), *cells, f"{total:.2f}")
    return table


def ranks_table(replicas: Mapping[int, ExecutorReport]) -> Table:
    """Show what each rank runs on and what it holds."""
    table = _table(
        "ranks",
        ("rank", "device", "dtype", "attention", "collectives"),
        ("pid", "weights MiB", "KV blocks", "KV MiB", "threads"),
    )
    # The replica uses as many blocks on every rank as its smallest rank can hold.
    num_blocks = {f"dp{dp_rank}": report.num_kv_blocks for dp_rank, report in replicas.items()}
    for role, report in _ranks(replicas):
        blocks = num_blocks[role.partition(" ")[0]]
        table.add_row(
            role,
            f"{report.device} {report.device_name}".strip(),
            report.dtype,
            report.attention_backend,
            report.collectives,
            str(report.pid),
            f"{report.weight_bytes / (1 << 20):.1f}",
            str(blocks),
            f"{blocks * report.kv_bytes_per_block / (1 << 20):.1f}",
            str(report.num_threads),
        )
    return table


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.2f}"


def print_tables(tables: Sequence[Table], file: IO[str]) -> None:
    """Write tables to `file`: in its width when it is a terminal, else without folding."""
    console = Console(file=file, width=None if file.isatty() else PLAIN_WIDTH, highlight=False)
    for table in tables:
        console.print(table)


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in texts:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def _ranks(replicas: Mapping[int, ExecutorReport]) -> Iterator[tuple[str, RankReport]]:
    for dp_rank, executor in sorted(replicas.items()):
        for report in sorted(executor.ranks, key=lambda report: report.tp_rank):
            yield f"dp{dp_rank} tp{report.tp_rank}", report
