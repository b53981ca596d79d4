"""What `cluster-bench latency` and `throughput` share: one LLM, and named workloads through it, timed as a whole.

Called by: latency.py and throughput.py, in the process of the benchmark. The prefix cache is emptied before each
run, and text is not made: what is measured is the engine and the model.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ...engine.llm import LLM
from ...shm.errors import ConfigError
from ...workers.config import LoadFormat
from ...workers.sampling_params import SamplingParams
from ...workers.transformer_config import read_transformer_config
from .errors import BenchError
from .floor import Ceilings, Floor, model_cost, workload_floor
from .offline_workload import NAMED, OfflineWorkload, make_workload, shorten
from .options import positive
from .progress import Progress
from .reference import Reference, read_reference
from .report import Table, show_number, show_spread
from .stats import over_runs

HOOKS = (
    "phalanx.workers.ceilings:measure_ceilings",
    "phalanx.workers.step_trace:begin_step_trace",
    "phalanx.workers.step_trace:end_step_trace",
)
TRACED_OUTPUT_LEN = 24
"""Tokens of each request in a trace: enough steps to see a pattern, and a file that a browser opens."""
_NUMBERS = {"bfloat16", "float16", "float32"}


class OfflineRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one workload. wall_s: of LLM.generate for all requests together."""

    run: int
    workload: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens / self.wall_s


class StartTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds until the engine could take requests.

    process_s: since this process began, imports included; llm_s: of making the LLM, in which torch is imported
    phases_s:  of rank 0, as it timed them itself
    """

    process_s: float
    llm_s: float
    phases_s: dict[str, float]


class OfflineResult(msgspec.Struct, frozen=True, kw_only=True):
    """All that a benchmark measured of one model.

    ceilings, floors: None and empty where the model's floor is not known; floors by workload
    traces:           the files written, by workload
    """

    model: str
    device: str
    dtype: str
    attention_backend: str
    start: StartTimes
    ceilings: Ceilings | None
    floors: dict[str, Floor]
    runs: list[OfflineRun]
    traces: dict[str, str] = {}


def add_offline_arguments(
    parser: argparse.ArgumentParser, *, workloads: Sequence[str], repetitions: int
) -> None:
    """Add the flags that both benchmarks have. workloads, repetitions: what they do unasked."""
    names = "; ".join(f"{name}: {what}" for name, what in NAMED.items())
    parser.add_argument("--model", required=True, metavar="DIR",
                        help="folder; with dummy weights its config.json is enough")  # fmt: skip
    parser.add_argument("--weights", choices=[one.value for one in LoadFormat], default=LoadFormat.AUTO.value,
                        help="auto: those of the folder; dummy: random ones")  # fmt: skip
    parser.add_argument(
        "--workload",
        action="append",
        metavar="NAME",
        default=None,
        help=f"may be repeated ({', '.join(workloads)}). {names}; or a shape: 8x9-3, 8x9-3:greedy, 8x9-3:filtered",
    )
    parser.add_argument("--repetitions", type=positive, default=repetitions, metavar="N",
                        help=f"runs ({repetitions})")  # fmt: skip
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one"
    )
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto",
                        help="auto: the model's on a GPU, float32 on CPU")  # fmt: skip
    parser.add_argument("--tp", type=positive, default=1, metavar="N", help="ranks (1)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="overrides",
                        help="any setting of the engine by its name, as max_num_batched_tokens=16384")  # fmt: skip
    parser.add_argument("--reference", type=Path, metavar="FILE",
                        help="times of another program (launch/bench/peers/*.json), to show ratios")  # fmt: skip
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="STEM",
        help=f"write STEM-WORKLOAD.json.gz, {TRACED_OUTPUT_LEN} tokens as a timeline for Perfetto",
    )
    parser.set_defaults(default_workloads=tuple(workloads))


def measure_offline(arguments: argparse.Namespace, *, title: str) -> tuple[OfflineResult, Reference | None]:
    """Do what the flags ask for.

    Raises ConfigError, BenchError, ProcessError, OSError.
    """
    reference = None if arguments.reference is None else read_reference(arguments.reference)
    config = read_transformer_config(arguments.model)
    names = arguments.workload or arguments.default_workloads
    try:
        workloads = [make_workload(name, vocab_size=config.vocab_size) for name in dict.fromkeys(names)]
    except ValueError as error:
        raise ConfigError("--workload", str(error)) from None
    began_at = time.monotonic()
    total = len(workloads) * (arguments.repetitions + 1 + (arguments.trace is not None))
    with Progress(title, total) as progress:
        progress.say("loading the model")
        with _open_llm(arguments, workloads, config.max_position_embeddings) as llm:
            rank = llm.report.ranks[0]
            start = StartTimes(
                process_s=_process_age_s(),
                llm_s=time.monotonic() - began_at,
                phases_s={phase.name: phase.duration_s for phase in rank.phases},
            )
            runs = list(_run_all(llm, workloads, arguments.repetitions, progress))
            ceilings = _measure_ceilings(llm)
            traces = {}
            if arguments.trace is not None:
                for workload in workloads:
                    progress.say(f"{workload.name}, trace")
                    traces[workload.name] = _trace(llm, workload, arguments.trace)
                    progress.advance()
    # Without a GPU the rates of a single large read and product are no bound for what stays in the CPU's caches.
    has_floor = rank.device != "cpu" and arguments.tp == 1 and rank.dtype in _NUMBERS
    floors = {}
    if has_floor:
        cost = model_cost(config, rank.dtype)
        floors = {
            one.name: workload_floor(cost, ceilings, one.prompt_lens, one.output_lens) for one in workloads
        }
    result = OfflineResult(
        model=Path(arguments.model).resolve().name,
        device=rank.device_name,
        dtype=rank.dtype,
        attention_backend=rank.attention_backend,
        start=start,
        ceilings=ceilings,
        floors=floors,
        runs=runs,
        traces=traces,
    )
    return result, reference


def group_runs(runs: Sequence[OfflineRun]) -> dict[str, list[OfflineRun]]:
    """Put the runs of each workload together, in the order in which they came first."""
    groups: dict[str, list[OfflineRun]] = {}
    for run in runs:
        groups.setdefault(run.workload, []).append(run)
    return groups


def comparison_cells(
    result: OfflineResult, reference: Reference | None, workload: str, median_s: float
) -> list[str]:
    """Say how near a time came to its floor, and how it stands beside the reference: two cells, "-" where unknown."""
    floor = result.floors.get(workload)
    other = None if reference is None else reference.find(result.model, workload)
    return [
        "-" if floor is None else f"{100 * floor.total_s / median_s:.0f} %",
        "-" if other is None else f"{other.wall_s / median_s:.2f}×",
    ]


def start_table(start: StartTimes) -> Table:
    """Lay out how long the start took."""
    rows = [
        ["process, imports included", show_number(start.process_s)],
        ["LLM(...)", show_number(start.llm_s)],
    ]
    rows += [[f"rank 0: {name}", show_number(spent_s)] for name, spent_s in start.phases_s.items()]
    return Table(title="Start, in seconds", columns=["until the engine is ready", "s"], rows=rows)


def describe(result: OfflineResult, reference: Reference | None) -> list[str]:
    """Say what the numbers hold for."""
    notes = [f"{result.model} in {result.dtype} on {result.device}, attention: {result.attention_backend}"]
    if result.ceilings is not None:
        notes.append(
            f"ceilings measured after the runs: {result.ceilings.read_bytes_per_s / 1e12:.2f} TB/s read, "
            f"{result.ceilings.matmul_flops / 1e12:.0f} TFLOP/s"
        )
    if reference is not None:
        notes.append(f"the ratio is to {reference.program}: {reference.source}")
    notes += [f"trace of {workload}: {path}" for workload, path in result.traces.items()]
    return notes


def spread_of_wall(runs: Sequence[OfflineRun]) -> tuple[float, str]:
    """Return the median time of one workload's runs, and how it is shown."""
    spread = over_runs(run.wall_s for run in runs)
    return spread.median, show_spread(spread)


@contextmanager
def _open_llm(
    arguments: argparse.Namespace, workloads: Sequence[OfflineWorkload], max_positions: int
) -> Iterator[LLM]:
    longest = max(workload.max_len for workload in workloads)
    if longest > max_positions:
        raise ConfigError(
            "--workload", f"needs {longest} tokens of context, and the model has {max_positions}"
        )
    overrides: dict[str, Any] = {"max_model_len": min(max_positions, max(4096, longest))}
    for entry in arguments.overrides:
        name, equals, value = entry.partition("=")
        if not equals:
            raise ConfigError("--set", f"must be NAME=VALUE, not {entry!r}")
        overrides[name] = _parse_value(value)
    llm = LLM(
        arguments.model,
        tensor_parallel_size=arguments.tp,
        dtype=arguments.dtype,
        device=arguments.device,
        skip_tokenizer_init=True,
        load_format=arguments.weights,
        hooks=HOOKS,
        **overrides,
    )
    with llm:
        yield llm


def _parse_value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _run_all(
    llm: LLM, workloads: Sequence[OfflineWorkload], repetitions: int, progress: Progress
) -> Iterator[OfflineRun]:
    """Each workload once unmeasured, then all of them by turns, so that a slow minute of the machine hits them all."""
    for workload in workloads:
        progress.say(f"{workload.name}, warm-up")
        _run_once(llm, workload)
        progress.advance()
    for number in range(repetitions):
        for workload in workloads:
            progress.say(f"{workload.name}, run {number + 1}")
            wall_s = _run_once(llm, workload)
            progress.advance()
            yield OfflineRun(
                run=number,
                workload=workload.name,
                num_requests=len(workload.prompts),
                num_prompt_tokens=sum(workload.prompt_lens),
                num_output_tokens=workload.num_output_tokens,
                wall_s=wall_s,
            )


def _run_once(llm: LLM, workload: OfflineWorkload) -> float:
    """Return the seconds that the requests took together. Raises BenchError when tokens are missing."""
    if not llm.reset_prefix_cache():
        raise BenchError("the prefix cache cannot be emptied: requests are still running")
    params = [
        SamplingParams(
            temperature=workload.temperature,
            top_k=workload.top_k,
            top_p=workload.top_p,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            seed=index,
        )
        for index, length in enumerate(workload.output_lens)
    ]
    began_at = time.perf_counter()
    outputs = llm.generate(workload.prompts, params, show_progress=False)
    wall_s = time.perf_counter() - began_at
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if num_tokens != workload.num_output_tokens:
        raise BenchError(f"{workload.name} made {num_tokens} tokens instead of {workload.num_output_tokens}")
    return wall_s


def _measure_ceilings(llm: LLM) -> Ceilings:
    outcome = llm.collective_rpc("measure_ceilings", result_type=Ceilings)[0]
    if outcome.result is None:
        raise BenchError(f"the device's ceilings cannot be measured: {outcome.error}")
    return outcome.result


def _trace(llm: LLM, workload: OfflineWorkload, stem: Path) -> str:
    path = stem.parent / f"{stem.name}-{workload.name.replace(':', '-')}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, argument in (("begin_step_trace", None), ("end_step_trace", str(path))):
        error = llm.collective_rpc(name, argument, result_type=object)[0].error
        if error is not None:
            raise BenchError(f"no trace: {error}")
        if argument is None:
            _run_once(llm, shorten(workload, TRACED_OUTPUT_LEN))
    return str(path)


def _process_age_s() -> float:
    """Seconds since this process began."""
    stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    # The second field is the program's name in brackets, which may hold anything.
    started_ticks = int(stat.rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
