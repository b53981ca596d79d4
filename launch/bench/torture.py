"""`cluster-bench torture`: streams on a cluster whose processes are killed at random, for as long as one likes.

Called by: cli.py and `make torture`. First every request is answered undisturbed, and its text kept; then the killing
begins, and each answer must have the same text. One replica is always left alone, so that there is somebody to go on;
all else may be hit at any moment, also while it starts again. When an API server is killed, the streams that it held
break: those are counted by themselves, everything else that ends with an error is lost.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
import uvloop

from .errors import BenchError
from .failover import BACK_TIMEOUT_S, RESTARTS
from .fleet_probe import FleetProbe
from .http_client import HttpClient
from .launched_cluster import LaunchedCluster, proportional_size
from .openai_client import OpenAIClient, RequestRecord
from .options import positive
from .pauses import Death, Pauses, SlowPauses, explain_pauses, measure_pauses
from .pauses import make_table as make_pause_table
from .progress import Progress
from .report import ReportWriter, Table, show_number
from .stats import over_runs
from .steady_load import SteadyLoad, make_bodies, make_client

NAME = "torture"
HELP = "kill processes of a cluster at random under live streams: requests lost, pauses, memory"
_API_SERVERS = ("--api-servers", "2")
"""Unless the command says another number: with one, all clients wait for its return when it dies."""
_API_SERVER = "api"
_COORDINATOR = "coordinator"
_API_SERVER_SHARE = 0.05
_COORDINATOR_SHARE = 0.1
_SAMPLE_EVERY_S = 5.0
_BROKEN_WITHIN_S = 2.0
"""After an API server's death, for its clients to see their connections break."""


class MemorySample(msgspec.Struct, frozen=True, kw_only=True):
    """Proportional set sizes in bytes, at an instant since the killing began.

    is_whole: all processes were there
    """

    at_s: float
    is_whole: bool
    supervisor_bytes: int
    all_bytes: int


class TortureRun(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    deaths:        in the order of time
    num_requests:  streams that ended after the killing began
    num_lost:      ended with an error, but for those of a killed API server; errors: by kind
    num_broken:    were held by an API server when it was killed
    num_different: ended well, and with another text than undisturbed
    undisturbed, tortured: pauses before the killing, and since
    slow:          the latter as far as they are longer than any of the former, by the deaths that lay in them
    """

    duration_s: float
    seed: int
    deaths: list[Death]
    num_requests: int
    num_lost: int
    num_broken: int
    num_different: int
    errors: dict[str, int]
    undisturbed: Pauses
    tortured: Pauses
    slow: list[SlowPauses]
    memory: list[MemorySample]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="of killing (10)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of who is killed when (0)")
    parser.add_argument("--pause", type=float, default=4.0, metavar="S",
                        help="between two kills, on average (4)")  # fmt: skip
    parser.add_argument("--concurrency", type=positive, default=32, metavar="N", help="streams (32)")
    parser.add_argument("--input-len", type=positive, default=64, metavar="N", help="prompt tokens (64)")
    parser.add_argument("--output-len", type=positive, default=200, metavar="N", help="output tokens (200)")
    parser.add_argument("launch", nargs=argparse.REMAINDER, metavar="-- ...",
                        help="arguments of cluster-launch, after --")  # fmt: skip


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Torture and report. Raises BenchError, also when a request was lost or has another text."""
    launch = arguments.launch[1:] if arguments.launch[:1] == ["--"] else arguments.launch
    with (
        LaunchedCluster([*_API_SERVERS, *launch, *RESTARTS]) as cluster,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        result = runner.run(_torture(cluster, arguments))
        cluster.stop()
    writer.finish(
        benchmark="torture: processes killed at random under live streams",
        num_runs=1,
        tables=make_tables(result),
        runs=[result],
        out=sys.stdout,
        notes=[
            f"load: {arguments.concurrency} streams of {arguments.input_len} prompt and {arguments.output_len} "
            "output tokens, half of them drawn from a seed, half with a stop string to look for",
            "one replica is always left alone",
        ],
    )
    if result.num_lost or result.num_different:
        raise BenchError(f"{result.num_lost} requests lost, {result.num_different} with another text")


def make_tables(result: TortureRun) -> list[Table]:
    """Lay out what came of it."""
    kills = Counter(death.victim for death in result.deaths)
    rows = [
        ["minutes", show_number(result.duration_s / 60)],
        ["kills", f"{kills.total()}"],
        ["requests", f"{result.num_requests}"],
        ["requests lost", f"{result.num_lost}"],
        ["with another text than undisturbed", f"{result.num_different}"],
        ["broken with their API server", f"{result.num_broken}"],
    ]
    for name, pauses in (("undisturbed", result.undisturbed), ("tortured", result.tortured)):
        shown = " / ".join(show_number(value) for value in (pauses.p50, pauses.p99, pauses.max))
        rows.append([f"longest pause of a stream, {name}: p50 / p99 / max, ms", shown])
    whole = [sample for sample in result.memory if sample.is_whole]
    third = len(whole) // 3
    if third:
        for name, read in (("supervisor", _read_supervisor), ("all processes", _read_all)):
            first, last = (over_runs(map(read, part)).median for part in (whole[:third], whole[-third:]))
            rows.append(
                [
                    f"memory of {name}, first and last third, MiB",
                    f"{show_number(first)} / {show_number(last)}",
                ]
            )
    return [
        Table(title="Torture", columns=["what", "value"], rows=rows),
        Table(
            title="Kills",
            columns=["process", "times"],
            rows=[[victim, str(count)] for victim, count in sorted(kills.items())],
        ),
        make_pause_table(result.slow),
    ]


def choose_victim(rng: random.Random, roles: Sequence[str], hurt: set[int], num_replicas: int) -> str | None:
    """Draw a process to kill, such that a replica is left that was not hurt; None: nobody may be hit now.

    roles: of all processes there are; hurt: dp_ranks that were hit since the cluster was last whole
    """
    luck = rng.random()
    if luck < _API_SERVER_SHARE:
        servers = [role for role in roles if role.startswith(_API_SERVER)]
        return rng.choice(servers) if servers else None
    if luck < _API_SERVER_SHARE + _COORDINATOR_SHARE:
        return _COORDINATOR if _COORDINATOR in roles else None
    candidates = [
        role for role in roles if role.startswith("dp") and len(hurt | {dp_rank_of(role)}) < num_replicas
    ]
    return rng.choice(candidates) if candidates else None


def dp_rank_of(role: str) -> int:
    """Return the replica of an engine core ("dp1") or of a worker ("dp1 tp0")."""
    return int(role.partition(" ")[0].removeprefix("dp"))


def judge(
    records: Sequence[RequestRecord],
    calm: Sequence[RequestRecord],
    deaths: Sequence[Death],
    began_at: float,
    **fields: object,
) -> TortureRun:
    """Count what became of the streams.

    calm:     the records of the same requests, undisturbed
    began_at: `time.perf_counter()` when the killing began
    """
    texts = {record.index: record.text for record in calm}
    undisturbed = measure_pauses(calm)
    broken_at = [began_at + death.at_s for death in deaths if death.victim.startswith(_API_SERVER)]
    failed = [record for record in records if record.error is not None]
    broken = [
        record
        for record in failed
        if any(record.sent_at <= at <= record.ended_at <= at + _BROKEN_WITHIN_S for at in broken_at)
    ]
    lost = [record for record in failed if record not in broken]
    done = [record for record in records if record.error is None]
    slow = explain_pauses(done, deaths, began_at=began_at, longer_than_s=undisturbed.max / 1000)
    return msgspec.convert(
        {
            "deaths": deaths,
            "num_requests": len(records),
            "num_lost": len(lost),
            "num_broken": len(broken),
            "num_different": sum(record.text != texts[record.index] for record in done),
            "errors": dict(Counter(f"{record.error}: {record.error_detail}" for record in lost)),
            "undisturbed": undisturbed,
            "tortured": measure_pauses(done),
            "slow": slow,
            **fields,
        },
        TortureRun,
        from_attributes=True,
    )


async def _torture(cluster: LaunchedCluster, arguments: argparse.Namespace) -> TortureRun:
    probe = FleetProbe(cluster)
    if probe.num_replicas < 2:
        raise BenchError("torture needs at least two replicas: --dp 2")
    http = HttpClient(cluster.url, {})
    client = await make_client(http, timeout_s=BACK_TIMEOUT_S)
    bodies = make_bodies(
        client.model,
        2 * arguments.concurrency,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        seed=arguments.seed,
    )
    load: SteadyLoad | None = None
    try:
        calm = await _ask_all(client, bodies, arguments.concurrency)
        load = SteadyLoad(client, bodies, concurrency=arguments.concurrency)
        tormentor = _Tormentor(cluster, probe, arguments)
        await tormentor.run()
        await probe.wait_whole(BACK_TIMEOUT_S)
        records = await load.stop()
        duration_s = time.perf_counter() - tormentor.began_at
    finally:
        if load is not None:
            await load.cancel()
        await probe.close()
        await http.close()
    return judge(
        records,
        calm,
        tormentor.deaths,
        tormentor.began_at,
        duration_s=duration_s,
        seed=arguments.seed,
        memory=tormentor.memory,
    )


async def _ask_all(client: OpenAIClient, bodies: Sequence[bytes], concurrency: int) -> list[RequestRecord]:
    """Have everything answered once, with nobody killed. Raises BenchError when one fails."""
    gate = asyncio.Semaphore(concurrency)

    async def ask(index: int) -> RequestRecord:
        async with gate:
            return await client.run(index, bodies[index], time.perf_counter())

    records = await asyncio.gather(*map(ask, range(len(bodies))))
    for record in records:
        if record.error is not None:
            raise BenchError(f"undisturbed, a request failed: {record.error} {record.error_detail}")
    return records


class _Tormentor:
    """Kills, and samples memory, for as long as it was told to."""

    def __init__(self, cluster: LaunchedCluster, probe: FleetProbe, arguments: argparse.Namespace) -> None:
        self.began_at = time.perf_counter()
        self.deaths: list[Death] = []
        self.memory: list[MemorySample] = []
        self._cluster = cluster
        self._probe = probe
        self._rng = random.Random(arguments.seed)
        self._pause_s = arguments.pause
        self._duration_s = 60.0 * arguments.minutes
        self._roles = set(cluster.pids())
        self._hurt: set[int] = set()

    async def run(self) -> None:
        next_kill_s = self._draw_pause()
        next_sample_s = 0.0
        seconds_shown = 0
        with Progress("torture", round(self._duration_s)) as progress:
            while (elapsed_s := time.perf_counter() - self.began_at) < self._duration_s:
                if elapsed_s >= next_sample_s:
                    next_sample_s = elapsed_s + _SAMPLE_EVERY_S
                    self._sample(elapsed_s)
                    progress.show(f"torture: {len(self.deaths)} kills")
                if elapsed_s >= next_kill_s:
                    next_kill_s = elapsed_s + self._draw_pause()
                    if (victim := await self._kill()) is not None:
                        progress.say(f"killed {victim}")
                progress.advance(int(elapsed_s) - seconds_shown)
                seconds_shown = int(elapsed_s)
                await asyncio.sleep(0.05)

    def _draw_pause(self) -> float:
        return self._rng.expovariate(1 / self._pause_s)

    async def _kill(self) -> str | None:
        if await self._probe.is_whole():
            self._hurt.clear()
        pids = self._cluster.pids()
        roles = sorted(set(pids) & self._roles)
        victim = choose_victim(self._rng, roles, self._hurt, self._probe.num_replicas)
        if victim is None:
            return None
        try:
            os.kill(pids[victim], signal.SIGKILL)
        except ProcessLookupError:
            return None
        self.deaths.append(Death(victim=victim, at_s=time.perf_counter() - self.began_at))
        if victim.startswith("dp"):
            self._hurt.add(dp_rank_of(victim))
        return victim

    def _sample(self, at_s: float) -> None:
        pids = self._cluster.pids()
        self.memory.append(
            MemorySample(
                at_s=at_s,
                is_whole=self._roles <= set(pids),
                supervisor_bytes=proportional_size(pids["supervisor"]),
                all_bytes=self._cluster.memory_bytes(),
            )
        )


def _read_supervisor(sample: MemorySample) -> float:
    return sample.supervisor_bytes / 2**20


def _read_all(sample: MemorySample) -> float:
    return sample.all_bytes / 2**20
