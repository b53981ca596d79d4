"""`cluster-bench throughput`: output tokens per second of many requests at once, through `LLM` in this process.

Called by: cli.py.
"""

import argparse
import sys

from .offline import (
    OfflineResult,
    add_offline_arguments,
    comparison_cells,
    describe,
    group_runs,
    measure_offline,
    spread_of_wall,
    start_table,
)
from .reference import Reference
from .report import ReportWriter, Table, show_number, show_spread
from .stats import over_runs

NAME = "throughput"
HELP = "output tokens per second of many requests at once, offline"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add_offline_arguments(parser, workloads=("batch64", "nano"), repetitions=3)


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Measure and report. Raises ConfigError, BenchError, ProcessError."""
    result, reference = measure_offline(arguments, title=NAME)
    writer.finish(
        benchmark=f"throughput: {result.model} offline",
        num_runs=arguments.repetitions,
        tables=[make_table(result, reference), start_table(result.start)],
        runs=result,
        out=sys.stdout,
        notes=describe(result, reference),
    )


def make_table(result: OfflineResult, reference: Reference | None) -> Table:
    """Lay out the runs: one row for each workload."""
    rows = []
    for workload, runs in group_runs(result.runs).items():
        median_s, shown = spread_of_wall(runs)
        rows.append(
            [
                workload,
                f"{runs[0].num_requests} × ({show_number(runs[0].num_prompt_tokens)} → {runs[0].num_output_tokens})",
                shown,
                show_spread(over_runs(run.tokens_per_s for run in runs)),
                *comparison_cells(result, reference, workload, median_s),
            ]
        )
    return Table(
        title="Throughput",
        columns=["workload", "requests × (tokens in → out)", "s", "tokens/s", "of the floor", "× reference"],
        rows=rows,
        note="Tokens in and out are those of all requests together.",
    )
