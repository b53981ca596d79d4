"""Numbers of all API servers as Prometheus series, whichever of them is asked.

Called by: the routes, which count what they serve, and GET /metrics. What a server counts, it counts in its row of a
table in shared memory (shared_series.py), and the row of each server outlives it. What the supervisor counts comes with
its updates, and what the engine cores report is read at scrape time (replica_metrics.py).
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..cluster.fleet import api_server_role
from ..cluster.messages import FleetUpdate
from ..cluster.replay import ReplayStats
from ..cluster.routing import RoutingReason
from ..cluster.supervision_events import ChildState
from ..engine.messages import EngineStats
from ..shm.number_table import NumberTable
from . import metric_series
from .metric_series import CounterSeries, HistogramSeries
from .replica_metrics import ReplicaCollector, ReplicaTotals
from .shared_series import SharedCollector, SharedCounter, SharedHistogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Place(NamedTuple):
    """Where an API server counts: the table of all of them, and its own row."""

    table: NumberTable
    row: int

    @classmethod
    def alone(cls) -> "Place":
        """Return the place of a server that has no others."""
        return cls(NumberTable.private(1, metric_series.NUM_COLUMNS), 0)


class ClusterCollector(Collector):
    """Turns what the supervisor says into series, and what each server knows just now. Thread: the event loop."""

    def __init__(self, model_name: str, fleet: Callable[[], FleetUpdate | None], place: Place) -> None:
        self._model_name = model_name
        self._fleet = fleet
        self._table, self._row = place

    def describe(self) -> Iterable[Metric]:
        """Describe nothing: the registry then does not collect at registration."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Give one family for each number."""
        fleet = self._fleet()
        if fleet is not None:
            for name, (text, read) in metric_series.PROCESS_COUNTERS.items():
                counter = CounterMetricFamily(name, text, labels=["model_name", "role"])
                for process in fleet.processes:
                    counter.add_metric([self._model_name, process.role], read(process))
                yield counter
            yield self._gauge("phalanx_ranks_stuck", "Processes that stand still.", len(fleet.stuck))
        rows = self._serving(fleet)
        parked = sum(self._table.get(row, metric_series.PARKED) for row in rows)
        yield self._gauge("phalanx_requests_parked", "Requests that wait for a replica.", parked)
        snapshots_at = [at for row in rows if (at := self._table.get(row, metric_series.SNAPSHOT_AT))]
        if snapshots_at:
            yield self._gauge(
                "phalanx_load_snapshot_age_seconds",
                "Age of the newest load snapshot that a front end has: of the one with the oldest.",
                max(0.0, time.monotonic() - min(snapshots_at)),
            )

    def _serving(self, fleet: FleetUpdate | None) -> list[int]:
        """The rows of servers that live: what others knew when they died is not so any more."""
        processes = fleet.processes if fleet is not None else ()
        ready = {process.role for process in processes if process.state is ChildState.READY}
        rows = range(self._table.num_rows)
        return [row for row in rows if row == self._row or api_server_role(row) in ready]

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([self._model_name], value)
        return gauge


class ServerMetrics:
    """What one API server counts, and what all of them have counted. Thread: the event loop.

    stats, num_ready, fleet, replay, num_routed, snapshot_age_s: what this server knows now
    place: where it counts; None: there is no other server
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], Mapping[int, EngineStats]],
        num_ready: Callable[[], int],
        *,
        fleet: Callable[[], FleetUpdate | None] = lambda: None,
        replay: Callable[[], ReplayStats | None] = lambda: None,
        num_routed: Callable[[], Mapping[RoutingReason, int]] = dict,
        snapshot_age_s: Callable[[], float | None] = lambda: None,
        place: Place | None = None,
    ) -> None:
        place = place or Place.alone()
        self._table, self._row = table, row = place
        self._stats = stats
        self._replay = replay
        self._num_routed = num_routed
        self._snapshot_age_s = snapshot_age_s

        def counter(series: CounterSeries) -> SharedCounter:
            return SharedCounter(table, row, series, metric_series.COLUMNS.first(series.name))

        def histogram(series: HistogramSeries) -> SharedHistogram:
            return SharedHistogram(table, row, series, metric_series.COLUMNS.first(series.name))

        self.first_token = histogram(metric_series.FIRST_TOKEN)
        self.between_tokens = histogram(metric_series.BETWEEN_TOKENS)
        self.whole_request = histogram(metric_series.WHOLE_REQUEST)
        self.prompt_tokens = counter(metric_series.PROMPT_TOKENS)
        self.generation_tokens = counter(metric_series.GENERATION_TOKENS)
        self._requests = counter(metric_series.REQUESTS)
        self._decisions = counter(metric_series.DECISIONS)
        self._replay_counters = [(counter(series), read) for series, read in metric_series.REPLAY.items()]
        self._totals = ReplicaTotals(table, row, metric_series.FIRST_OF_REPLICAS)
        self._registry = CollectorRegistry()
        self._registry.register(SharedCollector(table, metric_series.COLUMNS, model_name))
        self._registry.register(ReplicaCollector(model_name, stats, num_ready, self._totals))
        self._registry.register(ClusterCollector(model_name, fleet, place))
        self.share()

    def count_request(self, route: str, status: int) -> None:
        """Count one answered HTTP request. route: its path."""
        labels = (
            route if route in metric_series.COUNTED_ROUTES else metric_series.OTHER,
            str(status) if str(status) in metric_series.COUNTED_STATUSES else metric_series.OTHER,
        )
        self._requests.inc(labels=labels)

    def share(self) -> None:
        """Put into our row what is counted elsewhere in this process. Some times a second, and before `render`."""
        for stats in self._stats().values():
            self._totals.observe(stats)
        for reason, count in self._num_routed().items():
            self._decisions.follow(count, labels=(reason.value,))
        replay = self._replay()
        if replay is not None:
            for counter, read in self._replay_counters:
                counter.follow(read(replay))
        self._table.set(self._row, metric_series.PARKED, replay.num_parked if replay is not None else 0)
        age_s = self._snapshot_age_s()
        self._table.set(
            self._row, metric_series.SNAPSHOT_AT, 0 if age_s is None else time.monotonic() - age_s
        )

    def render(self) -> bytes:
        """Write all series in Prometheus's text format."""
        self.share()
        return generate_latest(self._registry)
