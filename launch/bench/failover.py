"""`cluster-bench failover`: what a replica's death costs those that it was serving.

Called by: cli.py. Starts a cluster, keeps streams on it, and kills one of its processes after the other with SIGKILL.
Which streams were on the lost replica is known from the API server's log, which names every request that continues.

A stream is resumed with the first piece after its longest pause around the death: what was still on its way when the
replica died belongs before. Its number is the time from SIGKILL to that piece, as its client sees it.
"""

import argparse
import asyncio
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Sequence

import msgspec
import uvloop

from .errors import BenchError
from .fleet_probe import FleetProbe
from .http_client import HttpClient
from .launched_cluster import LaunchedCluster
from .openai_client import RequestRecord
from .options import positive
from .progress import Progress
from .report import ReportWriter, Table, show_spread
from .stats import over_runs, summarize
from .steady_load import SteadyLoad, make_bodies, make_client

NAME = "failover"
HELP = "from SIGKILL of a worker or an engine core to the first resumed token, and to the replica's return"
RESTARTS = [
    word
    for setting in ("max_restarts=1000000", "restart_backoff_s=0.001", "max_restart_backoff_s=0.001")
    for word in ("--set", f"cluster.{setting}")
]
"""So that a process is started again as after a first death, at once, also at the tenth."""
BACK_TIMEOUT_S = 300.0
_SETTLE_S = 2.0
"""Before each kill, all streams run undisturbed for so long."""
_MAX_LAG_S = 0.5
"""Pieces of the lost replica may still arrive for so long after its death."""
_CONTINUES = re.compile(r"request continues .*request_id=(\S+)-\d+$", re.MULTILINE)


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One death. Seconds are from SIGKILL.

    num_moved:       streams that the lost replica had, all of which must go on
    first_resumed_s: until the first of them went on; last_resumed_s: the last. None: nobody was there
    back_s:          until all replicas served again
    num_lost:        requests under way then that ended with an error
    """

    victim: str
    num_moved: int
    first_resumed_s: float | None
    last_resumed_s: float | None
    back_s: float
    num_lost: int


class FailoverRun(msgspec.Struct, frozen=True, kw_only=True):
    """All deaths of one cluster.

    piece_p50_ms, piece_p99_ms: between two pieces of a stream, over all streams; deaths included
    """

    kills: list[Kill]
    num_requests: int
    num_lost: int
    piece_p50_ms: float
    piece_p99_ms: float


class _Death(msgspec.Struct, frozen=True, kw_only=True):
    victim: str
    killed_at: float
    back_at: float
    moved_ids: set[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--kills", type=positive, default=3, metavar="N", help="of each kind of process (3)")
    parser.add_argument("--concurrency", type=positive, default=32, metavar="N", help="streams (32)")
    parser.add_argument("--input-len", type=positive, default=64, metavar="N", help="prompt tokens (64)")
    parser.add_argument("--output-len", type=positive, default=400, metavar="N", help="output tokens (400)")
    parser.add_argument("launch", nargs=argparse.REMAINDER, metavar="-- ...",
                        help="arguments of cluster-launch, after --")  # fmt: skip


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Measure and report. Raises BenchError."""
    launch = arguments.launch[1:] if arguments.launch[:1] == ["--"] else arguments.launch
    result = measure_failover(
        launch,
        num_kills=arguments.kills,
        concurrency=arguments.concurrency,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
    )
    writer.finish(
        benchmark="failover: what a replica's death costs its streams",
        num_runs=arguments.kills,
        tables=make_tables(result),
        runs=[result],
        out=sys.stdout,
        notes=[
            f"load: {arguments.concurrency} streams of {arguments.input_len} prompt and {arguments.output_len} "
            "output tokens, each followed by the next",
            "the pause before a restart does not double here",
        ],
    )


def measure_failover(
    launch: Sequence[str], *, num_kills: int, concurrency: int, input_len: int, output_len: int
) -> FailoverRun:
    """Start a cluster, and kill `num_kills` of its engine cores and of its workers under load; see the flags.

    launch: arguments of cluster-launch, with at least two replicas. Raises BenchError.
    """
    with (
        LaunchedCluster([*launch, *RESTARTS]) as cluster,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        result = runner.run(_measure(cluster, num_kills, concurrency, input_len, output_len))
        cluster.stop()
    return result


def make_tables(result: FailoverRun) -> list[Table]:
    """Lay out the deaths, by kind of process."""
    rows = []
    for kind in ("worker", "engine core"):
        kills = [kill for kill in result.kills if _kind(kill.victim) == kind]
        if not kills:
            continue
        first = [kill.first_resumed_s for kill in kills if kill.first_resumed_s is not None]
        last = [kill.last_resumed_s for kill in kills if kill.last_resumed_s is not None]
        rows.append(
            [
                kind,
                str(len(kills)),
                show_spread(over_runs(1000 * seconds for seconds in first)) if first else "-",
                show_spread(over_runs(1000 * seconds for seconds in last)) if last else "-",
                show_spread(over_runs(kill.back_s for kill in kills)),
                str(sum(kill.num_moved for kill in kills)),
                str(sum(kill.num_lost for kill in kills)),
            ]
        )
    return [
        Table(
            title="From SIGKILL",
            columns=["killed", "times", "first stream goes on, ms", "all go on, ms", "replica back, s",
                     "streams moved", "requests lost"],
            rows=rows,
            note=f"Between two pieces of a stream: {result.piece_p50_ms:.1f} ms (median), "
            f"{result.piece_p99_ms:.1f} ms (p99). Requests in all: {result.num_requests}.",
        )
    ]  # fmt: skip


def judge(death: _Death, records: Sequence[RequestRecord]) -> Kill:
    """Say what one death cost, from all streams of the run."""
    under_way = [record for record in records if record.sent_at < death.killed_at < record.ended_at]
    resumed_s = [
        resumed_at(record, death.killed_at) - death.killed_at
        for record in under_way
        if record.response_id in death.moved_ids and record.error is None
    ]
    return Kill(
        victim=death.victim,
        num_moved=len(resumed_s),
        first_resumed_s=min(resumed_s, default=None),
        last_resumed_s=max(resumed_s, default=None),
        back_s=death.back_at - death.killed_at,
        num_lost=sum(record.error is not None for record in under_way),
    )


def resumed_at(record: RequestRecord, killed_at: float) -> float:
    """Return the instant of the first piece after the longest pause that began around a death."""
    instants = [record.sent_at, *record.token_at]
    pauses = [
        (after - before, after)
        for before, after in itertools.pairwise(instants)
        if after > killed_at and before < killed_at + _MAX_LAG_S
    ]
    return max(pauses)[1] if pauses else record.ended_at


async def _measure(
    cluster: LaunchedCluster, num_kills: int, concurrency: int, input_len: int, output_len: int
) -> FailoverRun:
    probe = FleetProbe(cluster)
    if probe.num_replicas < 2:
        raise BenchError("failover needs at least two replicas: --dp 2")
    http = HttpClient(cluster.url, {})
    client = await make_client(http, timeout_s=BACK_TIMEOUT_S)
    bodies = make_bodies(
        client.model,
        2 * concurrency,
        input_len=input_len,
        output_len=output_len,
        seed=0,
    )
    load = SteadyLoad(client, bodies, concurrency=concurrency)
    deaths = []
    try:
        with Progress("failover", 2 * num_kills) as progress:
            for number in range(num_kills):
                dp_rank = number % probe.num_replicas
                for victim in (f"dp{dp_rank}", f"dp{(dp_rank + 1) % probe.num_replicas} tp0"):
                    progress.say(f"kill {victim}")
                    deaths.append(await _kill(cluster, probe, victim))
                    progress.advance()
            await asyncio.sleep(_SETTLE_S)
            progress.say("last streams")
            records = await load.stop()
    finally:
        await load.cancel()
        await probe.close()
        await http.close()
    gaps_ms = summarize(
        1000 * (after - before) for record in records for before, after in itertools.pairwise(record.token_at)
    )
    return FailoverRun(
        kills=[judge(death, records) for death in deaths],
        num_requests=len(records),
        num_lost=sum(record.error is not None for record in records),
        piece_p50_ms=gaps_ms.p50,
        piece_p99_ms=gaps_ms.p99,
    )


async def _kill(cluster: LaunchedCluster, probe: FleetProbe, victim: str) -> _Death:
    """Kill a process while all is well, and wait until all is well again."""
    await probe.wait_whole(BACK_TIMEOUT_S)
    await asyncio.sleep(_SETTLE_S)
    num_said = len(cluster.said())
    pid = cluster.pids()[victim]
    killed_at = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    await probe.wait_hurt(BACK_TIMEOUT_S)
    back_at = await probe.wait_whole(BACK_TIMEOUT_S)
    moved_ids = set(_CONTINUES.findall(cluster.said(since=num_said)))
    return _Death(victim=victim, killed_at=killed_at, back_at=back_at, moved_ids=moved_ids)


def _kind(victim: str) -> str:
    return "worker" if " " in victim else "engine core"
