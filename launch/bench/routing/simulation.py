"""Many replicas, front ends and the coordinator's table in simulated time. Pure.

Called by: the benchmark's command and its tests. The load table, load book, prefix index and balancers are the real
ones, and peers' policies stand behind the same protocol; replicas are those of replica.py. Reports leave a replica as
often as an engine core's do, snapshots leave the table as often as the coordinator's do, and reach all front ends
`snapshot_delay_s` later. Requests come to the front ends in turn.
"""

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....cluster.load_table import LoadTable
from ....engine.core_loop import STATS_INTERVAL_AT_REST_S, STATS_INTERVAL_S
from ....engine.messages import EngineStats
from ....engine.prefix_log import PrefixDelta
from .load import Load, SimRequest
from .replica import Job, Replica, Service


class Router(Protocol):
    """A policy in one front end."""

    def choose(self, job: Job, now: float) -> int:
        """Return the dp_rank for a request that has just come."""
        ...

    def first_token(self, job: Job, now: float) -> None:
        """A request of this front end has its first token."""
        ...

    def finish(self, job: Job, now: float) -> None:
        """A request of this front end is over."""
        ...

    def take_snapshot(self, stats: Sequence[EngineStats], now: float) -> None:
        """Take the load of all replicas, a little old."""
        ...

    def take_delta(self, dp_rank: int, delta: PrefixDelta) -> None:
        """Take what has changed in a replica's prefix cache."""
        ...


MakeRouter = Callable[[int], Router]
"""client_index to the router of that front end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What the load meets."""

    data_parallel_size: int
    service: Service
    num_front_ends: int = 1
    snapshot_delay_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What came of one run. Times in seconds of simulated time; choose_s: real time of each decision.

    replica_tokens: by replica, tokens computed: prefill and decode
    """

    jobs: list[Job] = field(default_factory=list)
    choose_s: list[float] = field(default_factory=list)
    replica_tokens: list[int] = field(default_factory=list)
    hit_tokens: int = 0
    queried_tokens: int = 0
    num_preemptions: int = 0
    duration_s: float = 0.0


def simulate(load: Load, cluster: Cluster, make_router: MakeRouter, *, deadline_s: float = 1e9) -> Outcome:
    """Run the whole load to its end, or to `deadline_s`: what has not finished by then is left as it is."""
    return _Simulation(load, cluster, make_router).run(deadline_s)


class _Simulation:
    def __init__(self, load: Load, cluster: Cluster, make_router: MakeRouter) -> None:
        self._cluster = cluster
        self._replicas = [
            Replica(dp_rank, cluster.service, load.block_tokens)
            for dp_rank in range(cluster.data_parallel_size)
        ]
        self._routers = [make_router(index) for index in range(cluster.num_front_ends)]
        for replica in self._replicas:
            for router in self._routers:
                router.take_delta(replica.dp_rank, replica.first_delta)
        self._table = LoadTable()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._outcome = Outcome()
        self._now = 0.0
        self._num_open = load.num_requests
        self._num_arrived = 0
        self._is_ticking = False
        for at, request in load.arrivals:
            self._at(at, self._arrive, request)

    def run(self, deadline_s: float) -> Outcome:
        while self._events and self._num_open:
            self._now, _, call, arguments = heapq.heappop(self._events)
            if self._now > deadline_s:
                break
            call(*arguments)
        outcome = self._outcome
        outcome.duration_s = self._now
        for replica in self._replicas:
            outcome.replica_tokens.append(replica.num_prefill_tokens + replica.num_output_tokens)
            outcome.hit_tokens += replica.hit_tokens
            outcome.queried_tokens += replica.queried_tokens
            outcome.num_preemptions += replica.num_preemptions
        return outcome

    def _at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), call, arguments))

    def _arrive(self, request: SimRequest) -> None:
        client_index = self._num_arrived % len(self._routers)
        self._num_arrived += 1
        job = Job(request, client_index, self._now)
        began_at = time.perf_counter()
        dp_rank = self._routers[client_index].choose(job, self._now)
        self._outcome.choose_s.append(time.perf_counter() - began_at)
        self._outcome.jobs.append(job)
        replica = self._replicas[dp_rank]
        replica.add(job)
        if not replica.is_busy:
            self._begin(replica)
        elif (ends_at := replica.interrupt(self._now)) is not None:
            self._at(ends_at, self._end, replica, replica.generation)
        if not self._is_ticking:
            self._is_ticking = True
            self._tick()

    def _begin(self, replica: Replica) -> None:
        ends_at = replica.begin(self._now)
        self._tell_delta(replica)
        if ends_at is not None:
            self._at(ends_at, self._end, replica, replica.generation)

    def _end(self, replica: Replica, generation: int) -> None:
        if not replica.is_busy or generation != replica.generation:
            return
        first, finished = replica.end(self._now)
        for job in first:
            self._routers[job.client_index].first_token(job, self._now)
        for job in finished:
            self._routers[job.client_index].finish(job, self._now)
            self._num_open -= 1
            if job.request.follow_up is not None:
                self._at(self._now + job.request.think_s, self._arrive, job.request.follow_up)
        self._begin(replica)

    def _tell_delta(self, replica: Replica) -> None:
        delta = replica.take_delta()
        if delta is not None:
            for router in self._routers:
                router.take_delta(replica.dp_rank, delta)

    def _tick(self) -> None:
        """Reports, and a snapshot when one is due."""
        for replica in self._replicas:
            is_due = self._now - replica.reported_at >= STATS_INTERVAL_AT_REST_S
            if replica.has_changed or replica.is_busy or is_due:
                self._table.report(replica.stats(self._now))
        snapshot = self._table.publish(self._now)
        if snapshot is not None:
            self._at(self._now + self._cluster.snapshot_delay_s, self._deliver, snapshot.stats)
        if any(replica.num_unfinished for replica in self._replicas):
            self._at(self._now + STATS_INTERVAL_S, self._tick)
        else:
            self._is_ticking = False

    def _deliver(self, stats: Sequence[EngineStats]) -> None:
        for router in self._routers:
            router.take_snapshot(stats, self._now)
