"""`cluster-bench multi-gpu`: what several ranks give: the same tokens, how much faster, and what a sum over them costs.

Called by: cli.py. In one go: tensor parallel widths offline (greedy tokens against the first width, sums over the ranks
by every way there is, workloads of offline_workload.py, then step by step the time in sums and beside the ranks), then
data parallel widths through `cluster-launch` and its front end, then what the death of a rank costs. On CPU ranks it
measures nothing of interest, and shows that all of it works.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...shm.errors import ConfigError
from ...workers.transformer_config import read_transformer_config
from . import failover, replica_watch, step_tables
from .failover import FailoverRun, measure_failover
from .multi_gpu_dp import DataParallelRun, ServePlan, completion_texts, measure_data_parallel
from .multi_gpu_steps import StepsPlan, measure_steps
from .multi_gpu_tp import AllReduceRow, greedy_tokens_and_sums
from .offline import OfflineResult, add_offline_arguments, group_runs, measure_offline, spread_of_wall
from .offline_workload import make_workload
from .options import positive, positive_list
from .progress import Progress
from .report import ReportWriter, Table, show_number
from .step_rows import HostRow, SumRow
from .word_tokenizer import with_word_tokenizer

NAME = "multi-gpu"
HELP = "several ranks and replicas: same tokens, speed by width, the cost of a sum over the ranks"
EXACTNESS_WORKLOAD = "8x24-32:greedy"
PARTS = ("ranks", "texts", "offline", "steps", "served", "deaths")
"""Tokens and sums by tensor parallel width; texts by data parallel width; the workloads of either, and between them
the steps of the former; deaths."""
SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20)


class WidthCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy float32 outputs of one width beside those of the first. num_equal: of num_requests outputs."""

    kind: str
    width: int
    num_requests: int
    num_equal: int


class MultiGpuResult(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured.

    offline:             by tensor parallel width
    step_sums, step_host: of steps, by tensor parallel width and load
    deaths:              None with a single replica
    """

    checks: list[WidthCheck]
    sums: list[AllReduceRow]
    offline: dict[str, OfflineResult]
    step_sums: list[SumRow] = []
    step_host: list[HostRow] = []
    data_parallel: list[DataParallelRun]
    deaths: FailoverRun | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--model", required=True, metavar="DIR",
                        help="small model with weights: for the tokens, and the sums")  # fmt: skip
    parser.add_argument(
        "--speed-model",
        metavar="DIR",
        help="folder with a config.json, for the speed, with random weights (the small model)",
    )
    parser.add_argument(
        "--tp", type=positive_list, default=(1, 2), metavar="N,...", help="ranks offline (1,2)"
    )
    parser.add_argument(
        "--dp", type=positive_list, default=(1, 2), metavar="N,...", help="replicas served (1,2)"
    )
    parser.add_argument("--workload", action="append", metavar="NAME",
                        help="offline, may be repeated (single, nano)")  # fmt: skip
    parser.add_argument("--sizes", type=positive_list, default=SIZES, metavar="BYTES,...",
                        help="of the sums that are timed")  # fmt: skip
    parser.add_argument("--step-requests", type=positive_list, default=(1, 256), metavar="N,...",
                        help="running requests, step by step (1,256)")  # fmt: skip
    parser.add_argument("--steps", type=positive, default=64, metavar="N",
                        help="in each measurement of steps (64)")  # fmt: skip
    parser.add_argument("--repetitions", type=positive, default=3, metavar="N", help="runs (3)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="auto: GPUs if there are any")  # fmt: skip
    parser.add_argument("--part", action="append", choices=PARTS,
                        help="what to measure, may be repeated (all): each part starts ranks of its own")  # fmt: skip
    group = parser.add_argument_group("load on the front end, for each replica")
    group.add_argument("--num-requests", type=positive, default=256, metavar="N", help="in each run (256)")
    group.add_argument("--concurrency", type=positive, default=256, metavar="N", help="at once (256)")
    group.add_argument("--input-len", type=positive, default=512, metavar="N", help="prompt tokens (512)")
    group.add_argument("--output-len", type=positive, default=256, metavar="N", help="output tokens (256)")
    group.add_argument("--api-servers", type=positive, default=4, metavar="N", help="for each replica (4)")
    parser.add_argument("--death-output-len", type=positive, default=400, metavar="N",
                        help="output tokens of the streams that meet deaths (400)")  # fmt: skip


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Measure and report. Raises ConfigError, BenchError, ProcessError."""
    for name in ("model", "speed_model"):
        folder = getattr(arguments, name)
        if folder is not None and not (Path(folder) / "config.json").is_file():
            raise ConfigError(f"--{name.replace('_', '-')}", f"there is no config.json in {folder}")
    parts = arguments.part or PARTS
    num_tp, num_dp = len(arguments.tp), len(arguments.dp)
    lengths = {"texts": num_dp, "served": num_dp, "deaths": 1}
    lengths |= dict.fromkeys(("ranks", "offline", "steps"), num_tp)
    with Progress(NAME, sum(lengths[part] for part in set(parts))) as progress:
        checks, sums = _check_tensor_parallel(arguments, progress) if "ranks" in parts else ([], [])
        checks += _check_data_parallel(arguments, progress) if "texts" in parts else []
        offline = _measure_offline(arguments, progress) if "offline" in parts else {}
        step_sums, step_host = _measure_steps(arguments, progress) if "steps" in parts else ([], [])
        data_parallel = _measure_data_parallel(arguments, progress) if "served" in parts else []
        deaths = _measure_deaths(arguments, progress) if "deaths" in parts else None
    result = MultiGpuResult(
        checks=checks,
        sums=sums,
        offline=offline,
        step_sums=step_sums,
        step_host=step_host,
        data_parallel=data_parallel,
        deaths=deaths,
    )
    writer.finish(
        benchmark="multi-gpu: several ranks and replicas of one host",
        num_runs=arguments.repetitions,
        tables=make_tables(result),
        runs=result,
        out=sys.stdout,
        notes=[
            f"tokens: {EXACTNESS_WORKLOAD} in float32, each width beside the first one",
            f"front end: {arguments.num_requests} requests of {arguments.input_len} tokens in and "
            f"{arguments.output_len} out for each replica, {arguments.concurrency} at once, a client and "
            f"{arguments.api_servers} API servers for each",
        ],
    )


def make_tables(result: MultiGpuResult) -> list[Table]:
    """Lay out what was measured; parts that were not are left out."""
    tables = [
        Table(
            title="Greedy outputs equal to those of the first width",
            columns=["width", "equal", "of"],
            rows=[
                [f"{one.kind} {one.width}", str(one.num_equal), str(one.num_requests)]
                for one in result.checks
            ],
        ),
        *_sum_tables(result.sums),
        _offline_table(result.offline),
        *step_tables.make_tables(result.step_sums, result.step_host),
        _data_parallel_table(result.data_parallel),
        replica_watch.make_table(
            {f"dp {one.width}, run {one.run + 1}": one.replicas for one in result.data_parallel}
        ),
        *([] if result.deaths is None else failover.make_tables(result.deaths)),
    ]
    return [table for table in tables if table.rows]


def _sum_tables(sums: Sequence[AllReduceRow]) -> list[Table]:
    tables = []
    for width in dict.fromkeys(row.width for row in sums):
        own = [row for row in sums if row.width == width]
        ways = list(dict.fromkeys(row.way for row in own))
        rows = []
        for size in dict.fromkeys(row.num_bytes for row in own):
            cells = {row.way: row for row in own if row.num_bytes == size}
            rows.append([f"{size >> 10} KiB", *(_sum_cell(cells[way]) for way in ways)])
        problems = {row.way: row.problem for row in own if row.us is None}
        tables.append(
            Table(
                title=f"Sum over {width} ranks, µs",
                columns=["bytes", *ways],
                rows=rows,
                note="; ".join(f"{way}: {problem}" for way, problem in problems.items()),
            )
        )
    return tables


def _sum_cell(row: AllReduceRow) -> str:
    if row.us is None:
        return "-"
    faults = [*(["wrong"] if not row.is_exact else []), *(["bits differ"] if not row.has_equal_bits else [])]
    return show_number(row.us) + (f" ({', '.join(faults)})" if faults else "")


def _offline_table(offline: dict[str, OfflineResult]) -> Table:
    rows = []
    first_s: dict[str, float] = {}
    for width, result in offline.items():
        for workload, runs in group_runs(result.runs).items():
            median_s, shown = spread_of_wall(runs)
            first_s.setdefault(workload, median_s)
            num_steps = max(make_workload(workload, vocab_size=1).output_lens)
            rows.append(
                [
                    f"{workload}, tp {width}",
                    shown,
                    show_number(runs[0].num_output_tokens / median_s),
                    show_number(1e3 * median_s / num_steps),
                    f"{first_s[workload] / median_s:.2f}×",
                ]
            )
    return Table(
        title="Tensor parallel, offline",
        columns=["workload", "s", "tokens/s", "ms a step", "× first width"],
        rows=rows,
    )


def _data_parallel_table(runs: Sequence[DataParallelRun]) -> Table:
    rows = []
    first = None
    for width in dict.fromkeys(run.width for run in runs):
        own = [run for run in runs if run.width == width]
        rate = statistics.median(run.output_tokens_per_s for run in own)
        first = rate if first is None else first
        rows.append(
            [
                f"dp {width}",
                show_number(rate),
                f"{rate / first:.2f}×" if first else "-",
                show_number(statistics.median(run.ttft_p50_ms for run in own)),
                str(sum(run.num_failed for run in own)),
                show_number(own[0].ready_s),
            ]
        )
    return Table(
        title="Data parallel, through the front end",
        columns=["width", "output tokens/s", "× first width", "TTFT p50 ms", "failed", "start s"],
        rows=rows,
    )


def _check_tensor_parallel(
    arguments: argparse.Namespace, progress: Progress
) -> tuple[list[WidthCheck], list[AllReduceRow]]:
    checks: list[WidthCheck] = []
    sums: list[AllReduceRow] = []
    vocab_size = read_transformer_config(arguments.model).vocab_size
    workload = make_workload(EXACTNESS_WORKLOAD, vocab_size=vocab_size)
    expected: list[list[int]] = []
    for width in arguments.tp:
        progress.say(f"tokens and sums, tp {width}")
        tokens, rows = greedy_tokens_and_sums(
            arguments.model, width, workload, device=arguments.device, sizes=arguments.sizes
        )
        expected = expected or tokens
        sums += rows
        checks.append(_compare("tp", width, tokens, expected))
        progress.advance()
    return checks, sums


def _check_data_parallel(arguments: argparse.Namespace, progress: Progress) -> list[WidthCheck]:
    checks: list[WidthCheck] = []
    vocab_size = read_transformer_config(arguments.model).vocab_size
    workload = make_workload(EXACTNESS_WORKLOAD, vocab_size=vocab_size)
    expected: list[str] = []
    with with_word_tokenizer(arguments.model) as folder:
        for width in arguments.dp:
            progress.say(f"texts, dp {width}")
            texts = completion_texts(folder, width, workload, device=arguments.device)
            expected = expected or texts
            checks.append(_compare("dp", width, texts, expected))
            progress.advance()
    return checks


def _compare(kind: str, width: int, outputs: Sequence[object], expected: Sequence[object]) -> WidthCheck:
    num_equal = sum(one == other for one, other in zip(outputs, expected, strict=True))
    return WidthCheck(kind=kind, width=width, num_requests=len(expected), num_equal=num_equal)


def _measure_offline(arguments: argparse.Namespace, progress: Progress) -> dict[str, OfflineResult]:
    parser = argparse.ArgumentParser()
    add_offline_arguments(parser, workloads=("single", "nano"), repetitions=arguments.repetitions)
    words = ["--model", arguments.speed_model or arguments.model, "--device", arguments.device]
    if arguments.speed_model is not None:
        words += ["--weights", "dummy"]
    for workload in arguments.workload or ():
        words += ["--workload", workload]
    results = {}
    for width in arguments.tp:
        progress.say(f"offline, tp {width}")
        result, _ = measure_offline(parser.parse_args([*words, "--tp", str(width)]), title=f"tp {width}")
        results[str(width)] = result
        progress.advance()
    return results


def _measure_steps(arguments: argparse.Namespace, progress: Progress) -> tuple[list[SumRow], list[HostRow]]:
    plan = StepsPlan(
        requests=arguments.step_requests, prompt_len=arguments.input_len, num_steps=arguments.steps
    )
    sums: list[SumRow] = []
    host: list[HostRow] = []
    for width in arguments.tp:
        progress.say(f"steps, tp {width}")
        measures = measure_steps(
            arguments.speed_model or arguments.model,
            width,
            plan,
            device=arguments.device,
            has_dummy_weights=arguments.speed_model is not None,
        )
        sums += measures.sums
        host += measures.host
        progress.advance()
    return sums, host


def _measure_data_parallel(arguments: argparse.Namespace, progress: Progress) -> list[DataParallelRun]:
    plan = ServePlan(
        num_api_servers=arguments.api_servers,
        num_requests=arguments.num_requests,
        concurrency=arguments.concurrency,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        repetitions=arguments.repetitions,
    )
    is_dummy = arguments.speed_model is not None
    runs: list[DataParallelRun] = []
    with (
        with_word_tokenizer(arguments.speed_model or arguments.model) as folder,
        tempfile.TemporaryDirectory(prefix="cluster-bench-") as scratch,
    ):
        for width in arguments.dp:
            progress.say(f"front end, dp {width}")
            runs += measure_data_parallel(
                folder,
                width,
                plan,
                device=arguments.device,
                has_dummy_weights=is_dummy,
                scratch=Path(scratch),
            )
            progress.advance()
    return runs


def _measure_deaths(arguments: argparse.Namespace, progress: Progress) -> FailoverRun | None:
    """Kill an engine core and a worker of the widest cluster of the small model."""
    width = max(arguments.dp)
    if width < 2:
        return None
    progress.say(f"deaths, dp {width}")
    with with_word_tokenizer(arguments.model) as folder:
        result = measure_failover(
            [str(folder), "--dp", str(width), "--device", arguments.device],
            num_kills=1,
            concurrency=min(32, arguments.concurrency * width),
            input_len=min(64, arguments.input_len),
            output_len=arguments.death_output_len,
        )
    progress.advance()
    return result
