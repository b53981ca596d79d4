"""`cluster-bench executor`: what a decode step costs beside the model: encode, broadcast, decode, reply.

Called by: cli.py. The steps are those of a real scheduler, the executor is the one that serves; its workers compute
nothing (null_worker.py).
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...workers.config import CacheConfig, ExecutorConfig, ModelConfig, ParallelConfig
from ...workers.executor import make_worker_configs
from ...workers.messages import SchedulerOutput
from ...workers.multiproc_executor import MultiprocExecutor
from .decode_load import decode_steps
from .null_worker import NULL_WORKER
from .options import positive, positive_list
from .progress import Progress
from .report import ReportWriter, Table, show_number, show_spread
from .stats import Summary, over_runs, summarize

NAME = "executor"
HELP = "overhead of a decode step through the executor, with workers that compute nothing"
RANKS = (1, 2, 4, 8)
REQUESTS = (1, 64, 256)
_NUM_WARM_UP = 50


class ExecutorRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run: from submitting a step to having its tokens, in microseconds. step_bytes: encoded, on average."""

    run: int
    num_ranks: int
    num_requests: int
    step_bytes: int
    step_us: Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--ranks", type=positive_list, default=RANKS, metavar="N,...", help="workers")
    parser.add_argument(
        "--requests", type=positive_list, default=REQUESTS, metavar="N,...", help="running ones in a step"
    )
    parser.add_argument("--context-len", type=positive, default=1024, metavar="N", help="tokens each (1024)")
    parser.add_argument("--steps", type=positive, default=1000, metavar="N", help="in each run (1000)")
    parser.add_argument("--repetitions", type=positive, default=3, metavar="N", help="runs (3)")


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Measure and report. Raises ProcessError."""
    steps = {
        num_requests: decode_steps(num_requests, arguments.context_len, arguments.steps + _NUM_WARM_UP)
        for num_requests in arguments.requests
    }
    runs = []
    with (
        tempfile.TemporaryDirectory(prefix="cluster-bench-") as folder,
        Progress("executor", arguments.repetitions * len(arguments.ranks) * len(steps)) as progress,
    ):
        _write_model_config(Path(folder))
        for number in range(arguments.repetitions):
            for num_ranks in arguments.ranks:
                for num_requests, sequence in steps.items():
                    progress.say(f"run {number + 1}, {num_ranks} ranks, {num_requests} requests")
                    runs.append(_measure(folder, number, num_ranks, num_requests, sequence))
                    progress.advance()
    writer.finish(
        benchmark="executor: a decode step beside the model",
        num_runs=arguments.repetitions,
        tables=[make_table(runs)],
        runs=runs,
        out=sys.stdout,
        notes=[f"{arguments.steps} steps a run, contexts of {arguments.context_len} tokens"],
    )


def make_table(runs: Sequence[ExecutorRun]) -> Table:
    """Lay out the runs: one row for each number of ranks and requests."""
    rows = []
    for num_ranks, num_requests in dict.fromkeys((run.num_ranks, run.num_requests) for run in runs):
        own = [run for run in runs if (run.num_ranks, run.num_requests) == (num_ranks, num_requests)]
        rows.append(
            [
                f"{num_ranks} ranks, {num_requests} requests",
                show_number(own[0].step_bytes),
                show_spread(over_runs(run.step_us.p50 for run in own)),
                show_spread(over_runs(run.step_us.p99 for run in own)),
            ]
        )
    return Table(
        title="Executor overhead of a decode step",
        columns=["workers", "step bytes", "p50 µs", "p99 µs"],
        rows=rows,
        note="From submitting a step until its tokens are here: encode, broadcast, decode, reply.",
    )


def _measure(
    folder: str, number: int, num_ranks: int, num_requests: int, steps: Sequence[SchedulerOutput]
) -> ExecutorRun:
    worker_configs = make_worker_configs(
        model=ModelConfig(path=folder),
        cache=CacheConfig(),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks),
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests,
    )
    executor = MultiprocExecutor(
        worker_configs, config=ExecutorConfig(), role_prefix="bench", worker_class=NULL_WORKER
    )
    samples = []
    try:
        executor.start()
        for step in steps:
            began_at = time.perf_counter()
            executor.execute_model(step)
            samples.append((time.perf_counter() - began_at) * 1e6)
    finally:
        executor.close(reason="measured")
    step_bytes = sum(len(msgspec.msgpack.encode(step)) for step in steps[:_NUM_WARM_UP]) // _NUM_WARM_UP
    return ExecutorRun(
        run=number,
        num_ranks=num_ranks,
        num_requests=num_requests,
        step_bytes=step_bytes,
        step_us=summarize(samples[_NUM_WARM_UP:]),
    )


def _write_model_config(folder: Path) -> None:
    """Write what the executor reads of a model before it starts workers."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32_000,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "max_position_embeddings": 1 << 20,
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
