"""Tables and the picture of the routing benchmark. Pure, but for the file of the picture.

Called by: the benchmark's command.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from ..errors import BenchError
from ..report import Table, show_number, show_spread
from ..stats import over_runs
from .measure import RoutingRun
from .simulation import Cluster
from .throughput import Throughput


def describe_cluster(cluster: Cluster) -> str:
    """Name a cell: size, front ends, age of the snapshots."""
    return (
        f"dp {cluster.data_parallel_size}, front ends: {cluster.num_front_ends}, "
        f"snapshots {cluster.snapshot_delay_s * 1e3:.0f} ms on their way"
    )


def runs_of(runs: Sequence[RoutingRun], cluster: Cluster) -> list[RoutingRun]:
    """The runs of one cell."""
    wanted = (cluster.data_parallel_size, cluster.num_front_ends, cluster.snapshot_delay_s)
    return [
        run for run in runs if (run.data_parallel_size, run.num_front_ends, run.snapshot_delay_s) == wanted
    ]


def full_table(runs: Sequence[RoutingRun], cluster: Cluster) -> Table:
    """One row for each load and policy of one cell; medians over the seeds."""
    groups: dict[tuple[str, str], list[RoutingRun]] = {}
    for run in runs_of(runs, cluster):
        groups.setdefault((run.load, run.policy), []).append(run)
    rows = [
        [
            f"{load}, {policy}",
            show_number(_median(group, "ttft_p50_s") * 1e3),
            show_number(_median(group, "ttft_p99_s") * 1e3),
            show_number(_median(group, "tpot_p50_s") * 1e3),
            show_number(_median(group, "tpot_p99_s") * 1e3),
            show_number(_median(group, "e2e_p50_s")),
            show_number(_median(group, "e2e_p99_s")),
            f"{_median(group, 'hit_rate'):.1%}",
            f"{_median(group, 'spread'):.2f}",
            show_number(_median(group, "choose_p50_us")),
        ]
        for (load, policy), group in groups.items()
    ]
    return Table(
        title=describe_cluster(cluster),
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


def varied_table(runs: Sequence[RoutingRun], cells: Sequence[Cluster]) -> Table:
    """The p99 of TTFT in each cell: one row for each cell and load, one column for each policy that ran in all."""
    loads = list(dict.fromkeys(run.load for run in runs_of(runs, cells[-1])))
    policies = list(dict.fromkeys(run.policy for run in runs_of(runs, cells[-1])))
    rows = []
    for load in loads:
        for cluster in cells:
            found = [run for run in runs_of(runs, cluster) if run.load == load]
            values = [
                statistics.median(run.ttft_p99_s for run in found if run.policy == policy) * 1e3
                for policy in policies
            ]
            rows.append([f"{load}, {describe_cluster(cluster)}", *map(show_number, values)])
    return Table(title="TTFT p99, ms, as one thing changes", columns=["load, cluster", *policies], rows=rows)


def throughput_table(found: Sequence[Throughput], slo_s: float) -> Table:
    """Throughput of each policy on each load, how many times round robin's it is, and the hit rate there."""
    groups: dict[tuple[str, str], list[Throughput]] = {}
    for one in found:
        groups.setdefault((one.policy, one.load), []).append(one)
    policies, loads = (list(dict.fromkeys(values)) for values in zip(*groups, strict=True))
    rows = []
    for policy in policies:
        cells = []
        for load in loads:
            rate = over_runs(one.requests_per_s for one in groups[policy, load])
            hits = statistics.median(one.hit_rate for one in groups[policy, load])
            base = [one.requests_per_s for one in groups.get(("round_robin", load), ())]
            times = f"{rate.median / statistics.median(base):.2f}×, " if base else ""
            cells.append(f"{show_spread(rate)} ({times}{hits:.0%} hits)")
        rows.append([policy, *cells])
    return Table(
        title=f"Requests a second at a p99 of TTFT of {slo_s:g} s (× round robin)",
        columns=["policy", *loads],
        rows=rows,
        note="In a steady state. Bound: one replica as wide as all of them, with one cache.",
    )


def draw(runs: Sequence[RoutingRun], cluster: Cluster, path: Path) -> None:
    """Draw the p99 of TTFT in one cell, a group of bars for each load. Raises BenchError without matplotlib."""
    try:
        # Imported here: it is an extra, and only this needs it.
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install 'phalanx[plot]'") from None
    first = runs_of(runs, cluster)
    loads = list(dict.fromkeys(run.load for run in first))
    policies = list(dict.fromkeys(run.policy for run in first))
    figure = Figure(figsize=(4 + 1.3 * len(loads), 5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(policies)
    for index, policy in enumerate(policies):
        places, values = [], []
        for number, load in enumerate(loads):
            found = [run.ttft_p99_s for run in first if (run.load, run.policy) == (load, policy)]
            if found:
                places.append(number + index * width)
                values.append(statistics.median(found))
        axes.bar(places, values, width, label=policy, color=colormaps["tab20"](index))
    axes.set_yscale("log")
    axes.set_ylabel("p99 of the time to the first token, s")
    axes.set_xticks([number + 0.4 for number in range(len(loads))], loads, rotation=20)
    axes.set_ylim(bottom=min(run.ttft_p99_s for run in first) / 2)
    figure.legend(fontsize="small", loc="outside right upper")
    figure.savefig(path, dpi=100)


def _median(runs: Sequence[RoutingRun], name: str) -> float:
    return statistics.median(float(getattr(run, name)) for run in runs)
