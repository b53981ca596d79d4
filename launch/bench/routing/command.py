"""`cluster-bench routing`: every routing policy on the same loads, in simulated time; ours and those of peers.

Called by: cli.py. The parts of a front end that decide are the real ones; replicas are a model (replica.py) that takes
as long as a measured engine (service.py). Nothing but the time of a decision depends on the machine. Every policy
meets the same requests at the same instants.

The first values of --dp, --front-ends and --delays-ms make the cluster of the full table; each further value changes
that one thing, on fewer loads and policies.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import BenchError
from ..options import positive, positive_list
from ..progress import Progress
from ..report import ReportWriter
from .decision import decision_table
from .load import MADE_UP
from .measure import POLICIES, RATES, RoutingRun, make_load, measure
from .service import ASSUMED, describe, read_service, speed
from .simulation import Cluster
from .tables import draw, full_table, throughput_table, varied_table
from .throughput import BOUND, Throughput, Window, throughput_at

NAME = "routing"
HELP = "routing policies, ours and peers', in simulated time"
VARIED_LOADS = ("multi-turn", "shared-prefix", "no-reuse")
VARIED_POLICIES = ("prefix_aware", "kv_aware", "round_robin", "sglang-cache", "dynamo", "llm-d")
"""Where one thing changes, and where throughput is searched."""
SLO_LOADS = ("multi-turn", "tenant-chats", "shared-prefix")
"""Where throughput is searched."""
MIN_REQUESTS_PER_REPLICA = 20
"""A large cluster gets more requests than --requests says."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--traces", type=Path, metavar="FOLDER",
                        help="with Azure's and Mooncake's trace files; missing ones are left out")  # fmt: skip
    parser.add_argument("--loads", type=_names, metavar="NAME,...", help=f"of {', '.join(RATES)} (all)")
    parser.add_argument("--policies", type=_names, metavar="NAME,...", help=f"of {', '.join(POLICIES)} (all)")
    parser.add_argument("--requests", type=positive, default=800, metavar="N", help="of each load (800)")
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
    parser.add_argument("--warmup-s", type=float, default=120.0, metavar="S",
                        help="of that search: simulated time before requests count (120)")  # fmt: skip
    parser.add_argument("--window-s", type=float, default=60.0, metavar="S",
                        help="of that search: for how long requests count (60)")  # fmt: skip
    parser.add_argument("--seeds", type=positive_list, default=(11,), metavar="N,...",
                        help="of the loads that are made up (11; the policy was tuned on 1 to 4)")  # fmt: skip
    parser.add_argument("--service", type=Path, metavar="FILE",
                        help="result of cluster-bench steps: replicas are like that; rates follow")  # fmt: skip
    parser.add_argument("--kv-tokens", type=positive, metavar="N",
                        help="KV cache of a replica, in tokens (the service's)")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the p99 of TTFT; needs matplotlib")


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Simulate and report. Raises BenchError."""
    policies = _known(arguments.policies or POLICIES, POLICIES, "--policies")
    loads = _known(arguments.loads or tuple(RATES), tuple(RATES), "--loads")
    service, source = ASSUMED, "assumed: nothing of it is measured"
    if arguments.service is not None:
        service, source = read_service(arguments.service)
    if arguments.kv_tokens is not None:
        service = replace(service, capacity_tokens=arguments.kv_tokens)
    rate_factor = arguments.rate_factor * speed(service)
    base = Cluster(
        data_parallel_size=arguments.dp[0],
        service=service,
        num_front_ends=arguments.front_ends[0],
        snapshot_delay_s=arguments.delays_ms[0] / 1e3,
    )
    varied = list(_vary(base, arguments))
    few_loads = [name for name in VARIED_LOADS if name in loads]
    few_policies = [name for name in VARIED_POLICIES if name in policies]
    slo_loads = [name for name in SLO_LOADS if name in loads] if arguments.ttft_slo_s is not None else []
    runs: list[RoutingRun] = []
    throughputs: list[Throughput] = []
    total = len(loads) + len(varied) * len(few_loads) + len(slo_loads)
    with Progress(NAME, total) as progress:

        def measure_all(cluster: Cluster, name: str, names: Sequence[str], seeds: Sequence[int]) -> None:
            progress.say(f"{name}, dp {cluster.data_parallel_size}")
            num_requests = max(arguments.requests, MIN_REQUESTS_PER_REPLICA * cluster.data_parallel_size)
            rate = RATES[name] * cluster.data_parallel_size * rate_factor
            for seed in seeds if name in MADE_UP else seeds[:1]:
                load = make_load(name, num_requests, rate, seed, arguments.traces)
                if load is not None:
                    runs.extend(measure(load, policy, cluster, seed=seed) for policy in names)
            progress.advance()

        for name in loads:
            measure_all(base, name, policies, arguments.seeds)
        for cluster in varied:
            for name in few_loads:
                measure_all(cluster, name, few_policies, arguments.seeds[:1])
        for name in slo_loads:
            progress.say(f"{name}, throughput")
            rate = RATES[name] * base.data_parallel_size * rate_factor
            window = Window(
                slo_s=arguments.ttft_slo_s, warmup_s=arguments.warmup_s, window_s=arguments.window_s
            )
            for policy in (*few_policies, BOUND):
                for seed in arguments.seeds:
                    throughputs.append(throughput_at(name, seed, policy, base, window, rate))
            progress.advance()
    if not runs:
        raise BenchError("none of these loads can be made: --traces is missing, or has none of the files")
    tables = [full_table(runs, base)]
    if throughputs:
        tables.append(throughput_table(throughputs, arguments.ttft_slo_s))
    if varied and few_loads and few_policies:
        tables.append(varied_table(runs, [base, *varied]))
    tables.append(decision_table())
    writer.finish(
        benchmark="routing: policies in simulated time",
        num_runs=len(arguments.seeds),
        tables=tables,
        runs=[*runs, *throughputs],
        out=sys.stdout,
        notes=[
            f"the service ({source}): {describe(service)}",
            "simulated: all but the time of a decision is the same on every machine",
        ],
    )
    if arguments.plot is not None:
        draw(runs, base, arguments.plot)


def _vary(base: Cluster, arguments: argparse.Namespace) -> Iterator[Cluster]:
    """Clusters that differ from the first one in one thing."""
    for dp in arguments.dp[1:]:
        yield replace(base, data_parallel_size=dp)
    for front_ends in arguments.front_ends[1:]:
        yield replace(base, num_front_ends=front_ends)
    for delay_ms in arguments.delays_ms[1:]:
        yield replace(base, snapshot_delay_s=delay_ms / 1e3)


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
