"""`cluster-bench routing`: every routing policy on the same loads, in simulated time; ours and those of peers.

Called by: cli.py. The parts of a front end that decide are the real ones; replicas are a model (replica.py). Nothing
but the time of a decision depends on the machine. Every policy meets the same requests at the same instants.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ....cluster.routing import RoutingPolicy
from ....cluster.step_cost import StepCost
from ..errors import BenchError
from ..options import positive, positive_list
from ..progress import Progress
from ..report import ReportWriter, Table, show_number
from ..stats import summarize
from ..traces import parse_trace
from .load import MADE_UP, Load, from_trace
from .ours import OurRouter
from .peers import PEERS
from .replica import Service
from .simulation import Cluster, MakeRouter, Outcome, simulate

NAME = "routing"
HELP = "routing policies, ours and peers', in simulated time"
POLICIES = (*(policy.value for policy in RoutingPolicy), *PEERS)
TRACES = {
    "mooncake-conversation": "mooncake-conversation*.jsonl",
    "mooncake-synthetic": "mooncake-synthetic*.jsonl",
    "azure-conversation": "azure-llm-*-conv.csv",
    "azure-code": "azure-llm-*-code.csv",
}
"""Traces by name, and the files that they are read from in --traces."""
RATES = {
    "multi-turn": 40.0,
    "shared-prefix": 8.0,
    "heavy-tail": 8.0,
    "burst": 8.0,
    "no-reuse": 14.0,
    "mooncake-conversation": 1.5,
    "mooncake-synthetic": 1.0,
    "azure-conversation": 15.0,
    "azure-code": 10.0,
}
"""Requests a second and replica, so that a replica of the default service has much to do, and can do it."""


class RoutingRun(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one load. Times in seconds, hit_rate and spread (busiest replica / mean, in tokens) as parts."""

    load: str
    policy: str
    data_parallel_size: int
    num_front_ends: int
    snapshot_delay_s: float
    num_requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    hit_rate: float
    spread: float
    num_preemptions: int
    choose_p50_us: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--traces", type=Path, metavar="FOLDER",
                        help="with Azure's and Mooncake's trace files; missing ones are left out")  # fmt: skip
    parser.add_argument("--loads", type=_names, metavar="NAME,...", help=f"of {', '.join(RATES)} (all)")
    parser.add_argument("--policies", type=_names, metavar="NAME,...", help=f"of {', '.join(POLICIES)} (all)")
    parser.add_argument("--requests", type=positive, default=3000, metavar="N", help="of each load (3000)")
    parser.add_argument("--dp", type=positive_list, default=(8,), metavar="N,...", help="replicas (8)")
    parser.add_argument(
        "--front-ends", type=positive_list, default=(1,), metavar="N,...", help="API servers (1)"
    )
    parser.add_argument("--delays-ms", type=_numbers, default=(0.0,), metavar="MS,...",
                        help="of a snapshot on its way (0)")  # fmt: skip
    parser.add_argument(
        "--rate-factor", type=float, default=1.0, metavar="X", help="requests come X times as fast"
    )
    parser.add_argument("--ttft-slo-s", type=float, metavar="S",
                        help="also search the throughput at which the p99 of TTFT is S seconds")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the loads that are made up (0)")
    parser.add_argument("--service-us", type=_numbers, default=(6000.0, 32.0, 12.0, 0.033), metavar="A,P,D,C",
                        help="a step, a prefill, a decode and a context token, in µs (6000,32,12,0.033)")  # fmt: skip
    parser.add_argument("--kv-tokens", type=positive, default=600_000, metavar="N",
                        help="KV cache of a replica, in tokens (600000)")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the p99 of TTFT; needs matplotlib")


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Simulate and report. Raises BenchError."""
    if len(arguments.service_us) != 4:
        raise BenchError("--service-us needs four numbers")
    policies = _known(arguments.policies or POLICIES, POLICIES, "--policies")
    names = _known(arguments.loads or tuple(RATES), tuple(RATES), "--loads")
    service = make_service(arguments.service_us, arguments.kv_tokens)
    runs: list[RoutingRun] = []
    throughputs: dict[tuple[str, str], float] = {}
    cells = [
        Cluster(
            data_parallel_size=dp, service=service, num_front_ends=front_ends, snapshot_delay_s=delay_ms / 1e3
        )
        for dp in arguments.dp
        for front_ends in arguments.front_ends
        for delay_ms in arguments.delays_ms
    ]
    with Progress(NAME, len(cells) * len(names) * len(policies)) as progress:
        for cluster in cells:
            for name in names:
                rate = RATES[name] * cluster.data_parallel_size * arguments.rate_factor
                load = make_load(name, arguments.requests, rate, arguments.seed, arguments.traces)
                for policy in policies:
                    progress.say(f"{name}, {policy}, dp {cluster.data_parallel_size}")
                    if load is not None:
                        runs.append(measure(load, policy, cluster))
                        if arguments.ttft_slo_s is not None:
                            found = throughput_at(load, policy, cluster, arguments.ttft_slo_s, rate)
                            throughputs.setdefault((name, policy), found)
                    progress.advance()
    if not runs:
        raise BenchError("none of these loads can be made: --traces is missing, or has none of the files")
    tables = [make_table(runs, cluster) for cluster in cells]
    if throughputs:
        tables.append(_throughput_table(throughputs, arguments.ttft_slo_s))
    a, p, d, c = arguments.service_us
    writer.finish(
        benchmark="routing: policies in simulated time",
        num_runs=1,
        tables=tables,
        runs=runs,
        out=sys.stdout,
        notes=[
            f"a step takes {a} µs + {p} µs a prefill token + {d} µs a decode token + {c} µs a token of context; "
            f"{arguments.kv_tokens} tokens of KV cache; steps of at most {service.max_num_batched_tokens} tokens",
            "simulated: all but the time of a decision is the same on every machine",
        ],
    )
    if arguments.plot is not None:
        draw(runs, arguments.plot)


def make_service(service_us: Sequence[float], kv_tokens: int) -> Service:
    """A replica with the scheduler's default limits."""
    base, prefill, decode, context = (value / 1e6 for value in service_us)
    return Service(
        cost=StepCost(base_s=base, prefill_token_s=prefill, decode_token_s=decode, context_token_s=context),
        capacity_tokens=kv_tokens,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        long_prefill_share=0.5,
    )


def make_load(name: str, num_requests: int, rate: float, seed: int, folder: Path | None) -> Load | None:
    """Make a load by name. None: its trace is not there."""
    if name in MADE_UP:
        return MADE_UP[name](num_requests, rate, seed)
    files = sorted(folder.glob(TRACES[name])) if folder is not None else []
    if not files:
        return None
    return from_trace(name, parse_trace(files[0].read_text(encoding="utf-8"))[:num_requests], rate)


def measure(load: Load, policy: str, cluster: Cluster) -> RoutingRun:
    """Simulate one policy on one load, to the end of its last request."""
    outcome = simulate(load, cluster, router_maker(policy, cluster, load.block_tokens))
    ttft = summarize(job.first_token_at - job.arrived_at for job in outcome.jobs)
    tpot = summarize(
        (job.finished_at - job.first_token_at) / (job.request.num_output_tokens - 1)
        for job in outcome.jobs
        if job.request.num_output_tokens > 1
    )
    e2e = summarize(job.finished_at - job.arrived_at for job in outcome.jobs)
    return RoutingRun(
        load=load.name,
        policy=policy,
        data_parallel_size=cluster.data_parallel_size,
        num_front_ends=cluster.num_front_ends,
        snapshot_delay_s=cluster.snapshot_delay_s,
        num_requests=len(outcome.jobs),
        ttft_p50_s=ttft.p50,
        ttft_p99_s=ttft.p99,
        tpot_p50_s=tpot.p50,
        tpot_p99_s=tpot.p99,
        e2e_p50_s=e2e.p50,
        e2e_p99_s=e2e.p99,
        hit_rate=outcome.hit_tokens / max(1, outcome.queried_tokens),
        spread=_spread(outcome),
        num_preemptions=outcome.num_preemptions,
        choose_p50_us=summarize(outcome.choose_s).p50 * 1e6,
    )


def throughput_at(load: Load, policy: str, cluster: Cluster, slo_s: float, rate: float) -> float:
    """Search the highest rate, in requests a second, at which the p99 of TTFT stays within `slo_s`; to 5 %."""
    low, high = 0.0, 1.0
    while high < 64 and measure(load.faster(high), policy, cluster).ttft_p99_s <= slo_s:
        low, high = high, 2 * high
    while high - low > 0.05 * high:
        middle = (low + high) / 2
        if measure(load.faster(middle), policy, cluster).ttft_p99_s <= slo_s:
            low = middle
        else:
            high = middle
    return low * rate


def router_maker(policy: str, cluster: Cluster, block_tokens: int) -> MakeRouter:
    """Give the maker of one policy's routers."""
    if policy in PEERS:
        return lambda client_index: PEERS[policy](cluster, client_index, block_tokens)
    return lambda client_index: OurRouter(RoutingPolicy(policy), cluster, client_index, block_tokens)


def make_table(runs: Sequence[RoutingRun], cluster: Cluster) -> Table:
    """One row for each load and policy of one cluster."""
    rows = [
        [
            f"{run.load}, {run.policy}",
            show_number(run.ttft_p50_s * 1e3),
            show_number(run.ttft_p99_s * 1e3),
            show_number(run.tpot_p50_s * 1e3),
            show_number(run.tpot_p99_s * 1e3),
            show_number(run.e2e_p50_s),
            show_number(run.e2e_p99_s),
            f"{run.hit_rate:.1%}",
            f"{run.spread:.2f}",
            show_number(run.choose_p50_us),
        ]
        for run in runs
        if (run.data_parallel_size, run.num_front_ends, run.snapshot_delay_s)
        == (cluster.data_parallel_size, cluster.num_front_ends, cluster.snapshot_delay_s)
    ]
    return Table(
        title=f"dp {cluster.data_parallel_size}, front ends: {cluster.num_front_ends}, "
        f"snapshots {cluster.snapshot_delay_s * 1e3:.0f} ms on their way",
        columns=[
            "load, policy",
            "TTFT p50 ms",
            "p99",
            "TPOT p50 ms",
            "p99",
            "E2E p50 s",
            "p99",
            "hits",
            "max/mean",
            "choice µs",
        ],
        rows=rows,
    )


def draw(runs: Sequence[RoutingRun], path: Path) -> None:
    """Draw the p99 of TTFT, one group of bars for each load. Raises BenchError without matplotlib."""
    try:
        # Imported here: it is an extra, and only this needs it.
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install 'phalanx[plot]'") from None
    first = [run for run in runs if run.data_parallel_size == runs[0].data_parallel_size]
    loads, policies = (
        list(dict.fromkeys(values)) for values in zip(*((r.load, r.policy) for r in first), strict=True)
    )
    figure = Figure(figsize=(2 + 1.6 * len(loads), 5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(policies)
    for index, policy in enumerate(policies):
        values = {run.load: run.ttft_p99_s for run in first if run.policy == policy}
        places = [number + index * width for number, name in enumerate(loads) if name in values]
        axes.bar(places, [values[name] for name in loads if name in values], width, label=policy)
    axes.set_yscale("log")
    axes.set_ylabel("p99 of the time to the first token, s")
    axes.set_xticks([number + 0.4 for number in range(len(loads))], loads, rotation=20)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)


def _spread(outcome: Outcome) -> float:
    mean = sum(outcome.replica_tokens) / len(outcome.replica_tokens)
    return max(outcome.replica_tokens) / mean


def _throughput_table(throughputs: dict[tuple[str, str], float], slo_s: float) -> Table:
    loads, policies = (list(dict.fromkeys(values)) for values in zip(*throughputs, strict=True))
    return Table(
        title=f"Requests a second at a p99 of TTFT of {slo_s} s",
        columns=["load", *policies],
        rows=[[name, *(show_number(throughputs[name, policy]) for policy in policies)] for name in loads],
    )


def _known(wanted: Sequence[str], known: Sequence[str], flag: str) -> Sequence[str]:
    for name in wanted:
        if name not in known:
            raise BenchError(f"{flag}: {name!r} is none of {', '.join(known)}")
    return wanted


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if any(not 0 <= value < float("inf") for value in values):
        raise ValueError(text)
    return values
