"""`cluster-bench scheduler`: how long one step's decisions take, by running requests and by context length.

Called by: cli.py. Times `schedule()` and `update_from_output()` of steps in which every request decodes one token;
no model runs. Beside vLLM's scheduler, driven in the same way in an interpreter of its own.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from .decode_load import sample_all, start_decoding
from .options import positive, positive_list
from .peer_process import PeerProcess
from .progress import Progress
from .report import ReportWriter, Table, show_number, show_spread
from .stats import over_runs, quantile, summarize

NAME = "scheduler"
HELP = "time of the scheduler's decisions for one step, without a model"
OURS = "phalanx"
REQUESTS = (1, 32, 256, 1024)
CONTEXT_LENS = (1024, 32768)

Measure = Callable[[int, int, int], list[list[float]]]
"""Takes running requests, context tokens, steps; returns microseconds of each step's schedule, then update."""


class SchedulerRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run, in microseconds a step. Schedule and update on their own, as medians, and together."""

    run: int
    system: str
    num_requests: int
    num_context_tokens: int
    schedule_p50_us: float
    update_p50_us: float
    step_p50_us: float
    step_p99_us: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--requests", type=positive_list, default=REQUESTS, metavar="N,...", help="running ones in a step"
    )
    parser.add_argument("--context-len", type=positive, default=8192, metavar="N", help="tokens each (8192)")
    parser.add_argument("--context-lens", type=positive_list, default=CONTEXT_LENS, metavar="N,...",
                        help="more contexts, with --growth-requests (1024,32768)")  # fmt: skip
    parser.add_argument("--growth-requests", type=positive, default=32, metavar="N",
                        help="running ones while the context grows (32)")  # fmt: skip
    parser.add_argument("--steps", type=positive, default=200, metavar="N", help="in each run (200)")
    parser.add_argument("--repetitions", type=positive, default=3, metavar="N", help="runs (3)")
    parser.add_argument("--vllm-python", metavar="PATH",
                        help="interpreter of an environment with vLLM; left out without it")  # fmt: skip


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Measure and report. Raises BenchError."""
    cells = [(num_requests, arguments.context_len) for num_requests in arguments.requests]
    cells += [
        (arguments.growth_requests, context_len)
        for context_len in arguments.context_lens
        if (arguments.growth_requests, context_len) not in cells
    ]
    runs: list[SchedulerRun] = []
    with ExitStack() as resources:
        systems: dict[str, Measure] = {OURS: measure_steps}
        versions: dict[str, str] = {}
        notes = [
            f"{arguments.steps} steps a run; each request decodes one token a step; prefix caching is on"
        ]
        if arguments.vllm_python is not None:
            peer = resources.enter_context(
                PeerProcess("vllm", arguments.vllm_python, "vllm_scheduler.py.txt", (), env={})
            )
            versions = peer.versions
            systems["vllm"] = _peer_measure(peer)
        else:
            notes.append("vLLM's scheduler was left out: no --vllm-python")
        with Progress("scheduler", arguments.repetitions * len(cells) * len(systems)) as progress:
            for number in range(arguments.repetitions):
                for num_requests, context_len in cells:
                    names = list(systems)
                    for name in names if number % 2 == 0 else reversed(names):
                        progress.say(f"run {number + 1}, {num_requests} requests of {context_len}, {name}")
                        spent = systems[name](num_requests, context_len, arguments.steps)
                        runs.append(_to_run(number, name, num_requests, context_len, spent))
                        progress.advance()
    writer.finish(
        benchmark="scheduler: the decisions of one step",
        num_runs=arguments.repetitions,
        tables=[make_table(runs, list(systems))],
        runs=runs,
        out=sys.stdout,
        notes=notes,
        versions=versions,
    )


def measure_steps(num_requests: int, num_context_tokens: int, num_steps: int) -> list[list[float]]:
    """Time `num_steps` decode steps of our scheduler; see `Measure`."""
    scheduler = start_decoding(num_requests, num_context_tokens, num_steps)
    schedule_us, update_us = [], []
    for _ in range(num_steps):
        began_at = time.perf_counter()
        scheduled = scheduler.schedule()
        schedule_us.append((time.perf_counter() - began_at) * 1e6)
        assert scheduled is not None
        output = sample_all(scheduled)
        began_at = time.perf_counter()
        scheduler.update_from_output(scheduled, output)
        update_us.append((time.perf_counter() - began_at) * 1e6)
    return [schedule_us, update_us]


def make_table(runs: Sequence[SchedulerRun], systems: Sequence[str]) -> Table:
    """Lay out the runs: one row for each number of requests and context length."""
    rows = []
    for num_requests, context in dict.fromkeys((run.num_requests, run.num_context_tokens) for run in runs):
        row, medians = [f"{num_requests} × {context}"], {}
        for system in systems:
            own = [
                run
                for run in runs
                if (run.system, run.num_requests, run.num_context_tokens) == (system, num_requests, context)
            ]
            middle = over_runs(run.step_p50_us for run in own)
            medians[system] = middle.median
            row += [
                show_number(over_runs(run.schedule_p50_us for run in own).median),
                show_number(over_runs(run.update_p50_us for run in own).median),
                show_spread(middle),
                show_number(over_runs(run.step_p99_us for run in own).median),
            ]
        row += [f"{medians[system] / medians[OURS]:.1f}×" for system in systems if system != OURS]
        rows.append(row)
    columns = ["requests × context"]
    for system in systems:
        columns += [f"{system} {name}" for name in ("schedule", "update", "step p50", "step p99")]
    columns += [f"{system} / {OURS}" for system in systems if system != OURS]
    return Table(title="One step's decisions, in µs", columns=columns, rows=rows)


def _peer_measure(peer: PeerProcess) -> Measure:
    def measure(num_requests: int, num_context_tokens: int, num_steps: int) -> list[list[float]]:
        command = {
            "num_requests": num_requests,
            "num_context_tokens": num_context_tokens,
            "num_steps": num_steps,
        }
        answer: list[list[float]] = peer.ask(command)
        return answer

    return measure


def _to_run(
    number: int, system: str, num_requests: int, num_context_tokens: int, spent: Sequence[Sequence[float]]
) -> SchedulerRun:
    schedule_us, update_us = spent
    step = summarize(map(sum, zip(schedule_us, update_us, strict=True)))
    return SchedulerRun(
        run=number,
        system=system,
        num_requests=num_requests,
        num_context_tokens=num_context_tokens,
        schedule_p50_us=quantile(sorted(schedule_us), 0.5),
        update_p50_us=quantile(sorted(update_us), 0.5),
        step_p50_us=step.p50,
        step_p99_us=step.p99,
    )
