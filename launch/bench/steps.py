"""`cluster-bench steps`: what a step of the real engine costs on this machine, as a front end would learn it.

Called by: cli.py. Runs one engine core in this process under requests of mixed lengths, and feeds its reports, one a
step or one every few steps, to the same fit that front ends use (cluster/step_cost.py). What it writes is what
`cluster-bench routing --service` reads: the replicas of the simulation then take as long as this engine did.
"""

import argparse
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...cluster.step_cost import StepCost, StepCostFit, StepWork, work_between
from ...engine.config import EngineConfig
from ...engine.core import EngineCore
from ...engine.engine_options import make_engine_config
from ...engine.messages import EngineCoreRequest
from ...workers.config import LoadFormat
from ...workers.executor import create_executor
from ...workers.sampling_params import SamplingParams
from .errors import BenchError
from .options import positive
from .progress import Progress
from .report import ReportWriter, Table, show_number

NAME = "steps"
HELP = "cost of an empty step, and of each prefill, decode and context token in one"
_CHANGE_EVERY = 16
"""Steps between two changes of how many requests run at once: few and many, long and short must not go together."""
_REPORT_EVERY = 8
"""Steps between two reports where steps overlap: the time of one of them is partly that of its neighbours."""


class StepFit(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine's steps cost.

    capacity_tokens: of its KV cache; max_num_batched_tokens, max_num_seqs: of a step
    error:           median over the reports of |predicted - measured| / measured
    """

    model: str
    device: str
    dtype: str
    cost: StepCost
    capacity_tokens: int
    max_num_batched_tokens: int
    max_num_seqs: int
    num_steps: int
    error: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--model", required=True, metavar="DIR",
                        help="folder; with dummy weights its config.json is enough")  # fmt: skip
    parser.add_argument("--weights", choices=[one.value for one in LoadFormat], default=LoadFormat.AUTO.value,
                        help="auto: those of the folder; dummy: random ones")  # fmt: skip
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one"
    )
    parser.add_argument("--steps", type=positive, default=400, metavar="N", help="that are measured (400)")
    parser.add_argument("--max-requests", type=positive, default=64, metavar="N", help="at once (64)")
    parser.add_argument(
        "--max-prompt", type=positive, default=1024, metavar="N", help="longest (1024 tokens)"
    )
    parser.add_argument("--max-batched-tokens", type=positive, default=2048, metavar="N",
                        help="of a step (2048)")  # fmt: skip
    parser.add_argument("--cpu-time", action="store_true",
                        help="on CPU: one thread, timed by its CPU time: for a busy machine")  # fmt: skip


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Measure and report. Raises ConfigError, BenchError, ProcessError."""
    config = make_engine_config(
        arguments.model,
        device=arguments.device,
        load_format=arguments.weights,
        max_model_len=arguments.max_prompt + 256,
        max_num_batched_tokens=arguments.max_batched_tokens,
        max_num_seqs=arguments.max_requests,
    )
    if arguments.cpu_time:
        if arguments.device != "cpu":
            raise BenchError("--cpu-time: needs --device cpu; a GPU works beside this process")
        parallel = dataclasses.replace(config.parallel, num_threads=1)
        config = dataclasses.replace(config, parallel=parallel)
    clock = time.process_time if arguments.cpu_time else time.monotonic
    fit = measure(config, arguments.steps, arguments.max_prompt, clock=clock)
    cost = fit.cost
    rows = [
        ["a step", show_number(cost.base_s * 1e6)],
        ["a prefill token", show_number(cost.prefill_token_s * 1e6)],
        ["a decode token", show_number(cost.decode_token_s * 1e6)],
        ["a token of context", show_number(cost.context_token_s * 1e6)],
    ]
    writer.finish(
        benchmark=f"steps: {fit.model} on {fit.device}, {fit.dtype}",
        num_runs=1,
        tables=[
            Table(
                title="Cost",
                columns=["of", "µs"],
                rows=rows,
                note=f"Fitted to {fit.num_steps} steps; half of the reports are predicted to within {fit.error:.0%}.",
            )
        ],
        runs=fit,
        out=sys.stdout,
        notes=["timed by the CPU time of one thread"] if arguments.cpu_time else [],
    )


def measure(
    config: EngineConfig, num_steps: int, max_prompt: int, *, clock: Callable[[], float], seed: int = 0
) -> StepFit:
    """Run one engine core for `num_steps` steps under mixed requests, and fit.

    clock: that times the steps
    Raises BenchError, ProcessError.
    """
    executor = create_executor(
        model=config.model,
        cache=config.cache,
        parallel=config.parallel,
        executor=config.executor,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        in_process=config.parallel.tensor_parallel_size == 1,
    )
    with Progress(NAME, num_steps) as progress:
        progress.say("loading the model")
        report = executor.start()
        try:
            if report.ranks[0].device == "cpu":
                # As in LLM: a step is computed where it is submitted.
                scheduler = dataclasses.replace(config.scheduler, max_steps_in_flight=1)
                config = dataclasses.replace(config, scheduler=scheduler)
            core = EngineCore(config, executor, report, clock=clock)
            cost, works = _run_steps(core, config, num_steps, max_prompt, random.Random(seed), progress)
        finally:
            executor.close(reason="measured")
    if not works:
        raise BenchError("--steps: too few to fit anything")
    return StepFit(
        model=Path(config.model.path).resolve().name,
        device=report.ranks[0].device_name,
        dtype=report.ranks[0].dtype,
        cost=cost,
        capacity_tokens=report.num_kv_blocks * report.block_size,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        num_steps=sum(work.num_steps for work in works),
        error=statistics.median(abs(cost.predict(work) / work.busy_s - 1.0) for work in works),
    )


def _run_steps(
    core: EngineCore,
    config: EngineConfig,
    num_steps: int,
    max_prompt: int,
    rng: random.Random,
    progress: Progress,
) -> tuple[StepCost, list[StepWork]]:
    fit = StepCostFit()
    works: list[StepWork] = []
    last = core.stats()
    fit.observe(last)
    report_every = _REPORT_EVERY if config.scheduler.max_steps_in_flight > 1 else 1
    wanted = num_requests = 0
    for number in range(num_steps):
        if number % _CHANGE_EVERY == 0:
            progress.show(f"step {number}")
            wanted = rng.randint(1, config.scheduler.max_num_seqs)
        # A few at a time: prompts and decoding meet in the same steps, in all proportions.
        for _ in range(min(rng.randint(0, 2), wanted - core.num_unfinished_requests)):
            num_requests += 1
            core.add_request(_make_request(num_requests, max_prompt, core.report.vocab_size, rng))
        if not core.has_work:
            continue
        core.step()
        progress.advance()
        if number % report_every:
            continue
        stats = core.stats()
        fit.observe(stats)
        work = work_between(last, stats)
        if work is not None:
            works.append(work)
        last = stats
    core.abort_requests([f"steps-{number}" for number in range(num_requests + 1)])
    while core.has_work:
        core.step()
    return fit.cost, works


def _make_request(number: int, max_prompt: int, vocab_size: int, rng: random.Random) -> EngineCoreRequest:
    num_prompt_tokens = max(1, int(max_prompt ** rng.uniform(0.3, 1.0)))
    return EngineCoreRequest(
        request_id=f"steps-{number}",
        client_index=0,
        prompt_token_ids=[rng.randrange(vocab_size) for _ in range(num_prompt_tokens)],
        sampling_params=SamplingParams(max_tokens=rng.randint(4, 200), temperature=0.0, ignore_eos=True),
        eos_token_ids=(),
        seed=number,
        arrived_at=time.monotonic(),
    )
