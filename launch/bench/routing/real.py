"""`cluster-bench routing-real`: chats through real clusters, beside what the simulation says of the same chats.

Called by: cli.py. For each number of replicas and each policy it starts a cluster, plays seeded chats through it
(real_chats.py), and reads from its metrics how much of the prompts was in the prefix caches, and how even the work of
the replicas was. Then the same chats run in simulated time, under the same policy, with as many replicas of the
measured kind; their steps take as many times as long as those of the real ones did, for replicas share cores.

Every seed has tokens of its own: to its chats the cache, full of others' blocks, is as good as empty.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from ....cluster.routing import RoutingPolicy
from ..errors import BenchError
from ..http_client import HttpClient
from ..launched_cluster import LaunchedCluster
from ..options import positive, positive_list
from ..progress import Progress
from ..report import ReportWriter, Table, show_spread
from ..stats import over_runs
from ..steady_load import make_client
from .load import ChatShape, Load, chats, turns
from .measure import measure, spread_of
from .real_chats import play, spell, wait_counts, wait_replicas
from .replica import Service
from .service import describe, read_service
from .simulation import Cluster

NAME = "routing-real"
HELP = "prefix hits and spread of real replicas, beside the simulation of the same chats"
BLOCK_TOKENS = 16
REQUEST_TIMEOUT_S = 300.0


def short_answer(rng: random.Random) -> int:
    """Draw the length of an answer: a few tokens, so that a CPU can make them."""
    return min(int(rng.lognormvariate(1.5, 0.6)) + 1, 24)


SHORT_CHATS = ChatShape(
    block_tokens=BLOCK_TOKENS,
    num_systems=8,
    system_blocks=(8, 24),
    user_blocks=(1, 8),
    output=short_answer,
    mean_think_s=2.0,
)


class RealRun(msgspec.Struct, frozen=True, kw_only=True):
    """One seed's chats on one cluster. spread: tokens computed by the busiest replica / mean.

    replica_tokens: computed by each replica, prefill and output
    slowness:       how many times as long as the service says the replicas' steps took
    """

    data_parallel_size: int
    policy: str
    seed: int
    num_requests: int
    kv_tokens: int
    slowness: float
    replica_tokens: list[int]
    hit_rate: float
    spread: float
    simulated_hit_rate: float
    simulated_spread: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    policies = [policy.value for policy in RoutingPolicy]
    parser.add_argument("--service", type=Path, required=True, metavar="FILE",
                        help="result of cluster-bench steps: same model, device, limits of a step")  # fmt: skip
    parser.add_argument("--dp", type=positive_list, default=(2,), metavar="N,...", help="replicas (2)")
    parser.add_argument("--policies", type=lambda text: tuple(text.split(",")), metavar="NAME,...",
                        default=("prefix_aware", "round_robin"),
                        help=f"of {', '.join(policies)} (prefix_aware,round_robin)")  # fmt: skip
    parser.add_argument("--requests", type=positive, default=120, metavar="N", help="of each seed (120)")
    parser.add_argument("--rate", type=float, default=1.5, metavar="X",
                        help="requests a second, to all replicas together (1.5)")  # fmt: skip
    parser.add_argument("--think-s", type=float, default=SHORT_CHATS.mean_think_s, metavar="S",
                        help=f"from an answer to the next turn, on average ({SHORT_CHATS.mean_think_s})")  # fmt: skip
    parser.add_argument("--seeds", type=positive_list, default=(1, 2, 3), metavar="N,...",
                        help="of the chats (1,2,3)")  # fmt: skip
    parser.add_argument("launch", nargs=argparse.REMAINDER, metavar="-- ...",
                        help="arguments of cluster-launch, after --; dp, policy and block size are added")  # fmt: skip


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Measure, simulate and report. Raises BenchError."""
    launch = arguments.launch[1:] if arguments.launch[:1] == ["--"] else arguments.launch
    for flag, value in (("--rate", arguments.rate), ("--think-s", arguments.think_s)):
        if not 0 < value < float("inf"):
            raise BenchError(f"{flag}: must be above 0, not {value}")
    for policy in arguments.policies:
        if policy not in list(RoutingPolicy):
            raise BenchError(f"--policies: {policy!r} is none of {', '.join(RoutingPolicy)}")
    service, source = read_service(arguments.service)
    shape = replace(SHORT_CHATS, mean_think_s=arguments.think_s)
    loads = {
        seed: chats("chats", arguments.requests, arguments.rate, seed, shape) for seed in arguments.seeds
    }
    runs: list[RealRun] = []
    with Progress(NAME, len(arguments.dp) * len(arguments.policies) * len(loads)) as progress:
        for dp in arguments.dp:
            for policy in arguments.policies:
                progress.say(f"dp {dp}, {policy}")
                for one in measure_cluster(launch, dp, policy, loads, service):
                    runs.append(one)
                    progress.advance()
    writer.finish(
        benchmark="routing-real: prefix hits and spread, real and simulated",
        num_runs=len(loads),
        tables=[compare_table(runs)],
        runs=runs,
        out=sys.stdout,
        notes=[
            f"the service of the simulation ({source}): "
            f"{describe(replace(service, capacity_tokens=runs[0].kv_tokens))}",
            f"load: chats of up to 16 turns that begin with one of {SHORT_CHATS.num_systems} system prompts, "
            f"{arguments.rate:g} requests a second; every answer is one token again and again, so that prompts of "
            "later turns are known",
        ],
    )  # fmt: skip


def measure_cluster(
    launch: Sequence[str], dp: int, policy: str, loads: dict[int, Load], service: Service
) -> Sequence[RealRun]:
    """Start a cluster, play one load after the other through it, and simulate each. Raises BenchError.

    loads: by seed
    """
    added = ["--dp", str(dp), "--routing-policy", policy, "--set", f"cache.block_size={BLOCK_TOKENS}"]
    with (
        LaunchedCluster([*launch, *added]) as cluster,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runs = [
            runner.run(_measure(cluster.url, load, seed, dp, policy, service)) for seed, load in loads.items()
        ]
        cluster.stop()
    return runs


def slow_down(service: Service, factor: float) -> Service:
    """A service whose steps take `factor` times as long."""
    cost = service.cost
    return replace(
        service,
        cost=msgspec.structs.replace(
            cost,
            base_s=factor * cost.base_s,
            prefill_token_s=factor * cost.prefill_token_s,
            decode_token_s=factor * cost.decode_token_s,
            context_token_s=factor * cost.context_token_s,
        ),
    )


def compare_table(runs: Sequence[RealRun]) -> Table:
    """One row for each cluster: hits and spread, real, simulated, and how far apart a seed's two are at most."""
    groups: dict[tuple[int, str], list[RealRun]] = {}
    for one in runs:
        groups.setdefault((one.data_parallel_size, one.policy), []).append(one)
    rows = [
        [
            f"dp {dp}, {policy}",
            show_spread(over_runs(100 * one.hit_rate for one in group)),
            show_spread(over_runs(100 * one.simulated_hit_rate for one in group)),
            f"{max(100 * abs(one.hit_rate - one.simulated_hit_rate) for one in group):.1f}",
            show_spread(over_runs(one.spread for one in group)),
            show_spread(over_runs(one.simulated_spread for one in group)),
            f"{max(abs(one.spread - one.simulated_spread) for one in group):.2f}",
            show_spread(over_runs(one.slowness for one in group)),
        ]
        for (dp, policy), group in groups.items()
    ]
    return Table(
        title="Prefix hits (% of prompt tokens) and spread (tokens computed, busiest replica / mean)",
        columns=["cluster", "hits", "simulated", "apart", "max/mean", "simulated", "apart", "slowness"],
        rows=rows,
        note="Apart: the largest difference between the two numbers of one seed; of hits in points. Slowness: how "
        "many times as long as the service says the steps of the real replicas took; the simulated ones took as long.",
    )


async def _measure(url: str, load: Load, seed: int, dp: int, policy: str, service: Service) -> RealRun:
    http = HttpClient(url, {})
    try:
        client = await make_client(http, timeout_s=REQUEST_TIMEOUT_S)
        before = await wait_replicas(http, dp)
        await play(load, spell(load, seed), client)
        expected = sum(one.num_output_tokens for _, first in load.arrivals for one in turns(first))
        counts = await wait_counts(http, before, expected)
    finally:
        await http.close()
    works = [one.work for one in counts.values()]
    slowness = sum(work.busy_s for work in works) / sum(service.cost.predict(work) for work in works)
    tokens = [counts[rank].prefill_tokens + counts[rank].output_tokens for rank in range(dp)]
    kv_tokens = min(one.num_blocks for one in counts.values()) * load.block_tokens
    simulated = measure(
        load,
        policy,
        Cluster(
            data_parallel_size=dp, service=replace(slow_down(service, slowness), capacity_tokens=kv_tokens)
        ),
        seed=seed,
    )
    queried = sum(one.queried_tokens for one in counts.values())
    return RealRun(
        data_parallel_size=dp,
        policy=policy,
        seed=seed,
        num_requests=load.num_requests,
        kv_tokens=kv_tokens,
        slowness=slowness,
        replica_tokens=tokens,
        hit_rate=sum(one.hit_tokens for one in counts.values()) / max(1, queried),
        spread=spread_of(tokens),
        simulated_hit_rate=simulated.hit_rate,
        simulated_spread=simulated.spread,
    )
