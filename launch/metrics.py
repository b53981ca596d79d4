"""Numbers of one API server as Prometheus series.

Called by: the routes, which count what they serve, and GET /metrics. Each server has a registry of its own, so
that two of them in one test do not meet. What the engine cores report is read at scrape time. Their counters
start anew with each epoch of a replica; the sums here go on, so that no counter ever goes back.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..cluster.messages import FleetUpdate, ProcessInfo
from ..cluster.replay import ReplayStats
from ..engine.messages import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
BETWEEN_TOKENS_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
WHOLE_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

GAUGES: Mapping[str, tuple[str, Callable[[EngineStats], float]]] = {
    "phalanx_num_requests_running": ("Requests in the running batch.", lambda stats: stats.num_running),
    "phalanx_num_requests_waiting": ("Requests that wait to be admitted.", lambda stats: stats.num_waiting),
    "phalanx_kv_cache_usage_ratio": (
        "Part of the KV blocks held by running requests.",
        lambda stats: stats.kv_usage,
    ),
    "phalanx_kv_blocks_free": (
        "Free KV blocks, evictable ones included.",
        lambda stats: stats.num_free_blocks,
    ),
    "phalanx_kv_blocks_total": ("KV blocks of the replica.", lambda stats: stats.num_blocks),
}
COUNTERS: Mapping[str, tuple[str, Callable[[EngineStats], int]]] = {
    "phalanx_prefix_cache_queried_tokens": (
        "Prompt tokens looked up in the prefix cache.",
        lambda stats: stats.prefix_queried_tokens,
    ),
    "phalanx_prefix_cache_hit_tokens": (
        "Prompt tokens found in the prefix cache.",
        lambda stats: stats.prefix_hit_tokens,
    ),
    "phalanx_num_preemptions": ("Requests whose blocks were taken.", lambda stats: stats.num_preemptions),
    "phalanx_engine_steps": ("Steps of the engine core.", lambda stats: stats.num_steps),
}


PROCESS_COUNTERS: Mapping[str, tuple[str, Callable[[ProcessInfo], int]]] = {
    "phalanx_process_restarts": (
        "Starts of a process beyond its first, after a death or by an operator's wish.",
        lambda process: process.num_restarts,
    ),
    "phalanx_process_failures": (
        "Deaths of a process, those after a hang included.",
        lambda process: process.num_failures,
    ),
    "phalanx_process_hangs": (
        "Times that a replica was ended because one of its processes stood still.",
        lambda process: process.num_hangs,
    ),
}
"""Counted by the supervisor, so that they go on whichever process is started again."""
REPLAY_COUNTERS: Mapping[str, tuple[str, Callable[[ReplayStats], int]]] = {
    "phalanx_requests_replayed": (
        "Times that a request went on with another replica.",
        lambda stats: stats.num_replayed,
    ),
    "phalanx_requests_expired": (
        "Requests that found no replica in time after theirs was lost.",
        lambda stats: stats.num_expired,
    ),
    "phalanx_requests_blamed": (
        "Requests that were ended because replicas died of them.",
        lambda stats: stats.num_blamed,
    ),
    "phalanx_outputs_stale": (
        "Outputs of earlier attempts that were dropped.",
        lambda stats: stats.num_stale_outputs,
    ),
}


@dataclass(slots=True)
class _EpochSum:
    """A counter over all epochs of one replica: `base` of the earlier ones plus `latest` of this one."""

    epoch: int
    base: int = 0
    latest: int = 0


class ReplicaCollector(Collector):
    """Turns the newest report of each replica into series, at scrape time. Thread: the event loop."""

    def __init__(
        self, model_name: str, stats: Callable[[], Mapping[int, EngineStats]], num_ready: Callable[[], int]
    ) -> None:
        self._model_name = model_name
        self._stats = stats
        self._num_ready = num_ready
        self._sums: dict[tuple[str, int], _EpochSum] = {}

    def describe(self) -> Iterable[Metric]:
        """Describe nothing: the registry then does not collect at registration."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Give one family for each number, with one sample for each replica."""
        ready = GaugeMetricFamily("phalanx_replicas_ready", "Replicas that serve.", labels=["model_name"])
        ready.add_metric([self._model_name], self._num_ready())
        yield ready
        reports = sorted(self._stats().items())
        for name, (text, read) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name", "dp_rank"])
            for dp_rank, stats in reports:
                gauge.add_metric([self._model_name, str(dp_rank)], read(stats))
            yield gauge
        for name, (text, read_count) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["model_name", "dp_rank"])
            for dp_rank, stats in reports:
                total = self._total(name, dp_rank, stats.epoch, read_count(stats))
                counter.add_metric([self._model_name, str(dp_rank)], total)
            yield counter

    def _total(self, name: str, dp_rank: int, epoch: int, count: int) -> int:
        known = self._sums.setdefault((name, dp_rank), _EpochSum(epoch))
        if epoch > known.epoch:
            known.base += known.latest
            known.epoch, known.latest = epoch, 0
        if epoch == known.epoch:
            known.latest = max(known.latest, count)
        return known.base + known.latest


class ClusterCollector(Collector):
    """Turns what is known of processes and lost requests into series, at scrape time. Thread: the event loop."""

    def __init__(
        self,
        model_name: str,
        fleet: Callable[[], FleetUpdate | None],
        replay: Callable[[], ReplayStats | None],
    ) -> None:
        self._model_name = model_name
        self._fleet = fleet
        self._replay = replay

    def describe(self) -> Iterable[Metric]:
        """Describe nothing: the registry then does not collect at registration."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Give one family for each number."""
        fleet, replay = self._fleet(), self._replay()
        if fleet is not None:
            for name, (text, read) in PROCESS_COUNTERS.items():
                counter = CounterMetricFamily(name, text, labels=["model_name", "role"])
                for process in fleet.processes:
                    counter.add_metric([self._model_name, process.role], read(process))
                yield counter
            stuck = GaugeMetricFamily(
                "phalanx_ranks_stuck", "Ranks and engine cores that stand still.", labels=["model_name"]
            )
            stuck.add_metric([self._model_name], len(fleet.stuck))
            yield stuck
        if replay is not None:
            for name, (text, read_count) in REPLAY_COUNTERS.items():
                counter = CounterMetricFamily(name, text, labels=["model_name"])
                counter.add_metric([self._model_name], read_count(replay))
                yield counter
            parked = GaugeMetricFamily(
                "phalanx_requests_parked", "Requests that wait for a replica.", labels=["model_name"]
            )
            parked.add_metric([self._model_name], replay.num_parked)
            yield parked


class ServerMetrics:
    """The series of one API server. Thread: the event loop."""

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], Mapping[int, EngineStats]],
        num_ready: Callable[[], int],
        *,
        fleet: Callable[[], FleetUpdate | None] = lambda: None,
        replay: Callable[[], ReplayStats | None] = lambda: None,
        routing: Collector | None = None,
    ) -> None:
        self._registry = CollectorRegistry()
        if routing is not None:
            self._registry.register(routing)
        self._registry.register(ReplicaCollector(model_name, stats, num_ready))
        self._registry.register(ClusterCollector(model_name, fleet, replay))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)
            return family.labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=self._registry).labels(model_name)

        self._model_name = model_name
        self._requests = Counter(
            "phalanx_requests",
            "HTTP requests by route and status; 499: the client left.",
            ["model_name", "route", "status"],
            registry=self._registry,
        )
        self.first_token = histogram(
            "phalanx_time_to_first_token_seconds", "From arrival to the first output.", FIRST_TOKEN_BUCKETS
        )
        self.between_tokens = histogram(
            "phalanx_inter_token_latency_seconds", "Between one output and the next.", BETWEEN_TOKENS_BUCKETS
        )
        self.whole_request = histogram(
            "phalanx_e2e_request_latency_seconds", "From arrival to the last output.", WHOLE_REQUEST_BUCKETS
        )
        self.prompt_tokens = counter("phalanx_prompt_tokens", "Prompt tokens of served requests.")
        self.generation_tokens = counter("phalanx_generation_tokens", "Output tokens.")

    def count_request(self, route: str, status: int) -> None:
        """Count one answered HTTP request."""
        self._requests.labels(self._model_name, route, str(status)).inc()

    def render(self) -> bytes:
        """Write all series in Prometheus's text format."""
        return generate_latest(self._registry)
