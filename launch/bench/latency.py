"""`cluster-bench latency`: the time of one token when few requests run, through `LLM` in this process.

Called by: cli.py. Times whole calls of `LLM.generate`: a token's time is the call's, by the
tokens of its longest request.
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
from .offline_workload import make_workload
from .reference import Reference
from .report import ReportWriter, Table, show_number, show_spread
from .stats import over_runs

NAME = "latency"
HELP = "time for a token with few requests, offline; with a timeline of the steps if wanted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add_offline_arguments(parser, workloads=("single",), repetitions=5)


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Measure and report. Raises ConfigError, BenchError, ProcessError."""
    result, reference = measure_offline(arguments, title=NAME)
    writer.finish(
        benchmark=f"latency: {result.model} offline",
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
        num_steps = max(make_workload(workload, vocab_size=1).output_lens)
        median_s, _ = spread_of_wall(runs)
        rows.append(
            [
                workload,
                show_spread(over_runs(1e3 * run.wall_s for run in runs)),
                show_spread(over_runs(1e3 * run.wall_s / num_steps for run in runs)),
                show_number(runs[0].num_output_tokens / median_s),
                *comparison_cells(result, reference, workload, median_s),
            ]
        )
    return Table(
        title="Latency",
        columns=["workload", "whole ms", "ms a step", "tokens/s", "of the floor", "× reference"],
        rows=rows,
        note="A step's time: the whole, prefill included, by the output tokens of the longest request.",
    )
