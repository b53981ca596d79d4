"""`cluster-bench startup`: how long a cluster takes from the command to being ready, and to stop again.

Called by: cli.py. Starts `cluster-launch` as its operator does, and reads the tables that it prints when it is ready
(launch/tables.py): when each process was, and how long each phase of each rank took.

When the cluster does not start: BenchError with its last words.
"""

import argparse
import re
import sys
from collections.abc import Sequence

import msgspec

from .launched_cluster import LaunchedCluster
from .options import positive
from .progress import Progress
from .report import ReportWriter, Table, show_spread
from .stats import over_runs

NAME = "startup"
HELP = "time from cluster-launch to ready, by phase, and to its end"
_PROCESSES = "processes"
_RANKS = "start-up, seconds"


class StartupRun(msgspec.Struct, frozen=True, kw_only=True):
    """One start and stop, in seconds.

    ready_s:      from running the command until it says that it is ready; stop_s: from Ctrl-C to the end of all
    processes_s:  by process, from its own start until it was ready
    phases_s:     by rank, then by phase, as the rank itself timed them
    memory_bytes: proportional share of all processes together, when the cluster was ready
    """

    run: int
    ready_s: float
    stop_s: float
    memory_bytes: int
    processes_s: dict[str, float]
    phases_s: dict[str, dict[str, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--repetitions", type=positive, default=3, metavar="N", help="runs (3)")
    parser.add_argument("launch", nargs=argparse.REMAINDER, metavar="-- ...",
                        help="arguments of cluster-launch, after --")  # fmt: skip


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Measure and report. Raises BenchError."""
    launch = arguments.launch[1:] if arguments.launch[:1] == ["--"] else arguments.launch
    runs = []
    with Progress("startup", arguments.repetitions) as progress:
        for number in range(arguments.repetitions):
            progress.say(f"run {number + 1}")
            runs.append(measure_start(number, launch))
            progress.advance()
    writer.finish(
        benchmark="startup: from the command to ready",
        num_runs=arguments.repetitions,
        tables=make_tables(runs),
        runs=runs,
        out=sys.stdout,
        notes=["the model's files are in memory from the second run on, if not before"],
    )


def measure_start(number: int, launch: Sequence[str]) -> StartupRun:
    """Start a cluster, wait until it is ready, and stop it. Raises BenchError when it does not start or stop."""
    with LaunchedCluster(launch) as cluster:
        lines, ready_s = cluster.lines, cluster.ready_s
        memory_bytes = cluster.memory_bytes()
        stop_s = cluster.stop()
    return StartupRun(
        run=number,
        ready_s=ready_s,
        stop_s=stop_s,
        memory_bytes=memory_bytes,
        processes_s={role: cells["ready after s"] for role, cells in read_table(lines, _PROCESSES).items()},
        phases_s={
            rank: {name: spent_s for name, spent_s in cells.items() if name != "pid"}
            for rank, cells in read_table(lines, _RANKS).items()
        },
    )


def read_table(lines: Sequence[str], title: str) -> dict[str, dict[str, float]]:
    """Read a printed table: by the first column, then by the column's name, what is a number.

    lines: of the output, the table's title alone on one of them. Empty when there is no such table.
    """
    rows = iter(lines)
    if not any(line.strip() == title for line in rows):
        return {}
    columns: list[str] = []
    table: dict[str, dict[str, float]] = {}
    for line in rows:
        if line.startswith("┃"):
            columns = [cell.strip() for cell in line.strip().strip("┃").split("┃")]
        elif line.startswith("│"):
            name, *cells = (cell.strip() for cell in line.strip().strip("│").split("│"))
            numbers = zip(columns[1:], cells, strict=True)
            table[name] = {column: float(cell) for column, cell in numbers if re.fullmatch(r"[\d.]+", cell)}
        elif line.startswith("└"):
            break
    return table


def make_tables(runs: Sequence[StartupRun]) -> list[Table]:
    """Lay out the runs: the whole, each process, and the phases of each rank."""
    whole = Table(
        title="Start and stop",
        columns=["what", "median [lowest-highest]"],
        rows=[
            ["seconds until ready", show_spread(over_runs(run.ready_s for run in runs))],
            ["seconds to stop", show_spread(over_runs(run.stop_s for run in runs))],
            ["memory when ready, MiB", show_spread(over_runs(run.memory_bytes / 2**20 for run in runs))],
            *(
                [f"{role}: seconds from its own start until ready", show_spread(over_runs(values))]
                for role in runs[0].processes_s
                if (values := [run.processes_s[role] for run in runs if role in run.processes_s])
            ),
        ],
        note="Memory: proportional set size of all processes together.",
    )
    phases = list(dict.fromkeys(name for cells in runs[0].phases_s.values() for name in cells))
    rows = []
    for rank in runs[0].phases_s:
        row = [rank]
        for name in phases:
            values = [run.phases_s[rank][name] for run in runs if name in run.phases_s.get(rank, {})]
            row.append(show_spread(over_runs(values)) if values else "-")
        rows.append(row)
    return [whole, Table(title="Phases of each rank, in seconds", columns=["rank", *phases], rows=rows)]
