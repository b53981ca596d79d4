"""What the replicas report of themselves, as Prometheus series.

Called by: metrics.py, at scrape time and some times a second. Gauges are those of the newest reports. A replica's own
counters start anew with each of its lives; their sums here go on, so that no counter ever goes back.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine.messages import EngineStats
from ..shm.number_table import NumberTable
from .metric_series import COLUMNS_PER_REPLICA, COUNTERS, GAUGES


class ReplicaTotals:
    """The counters of all replicas, over all their lives, as one server has seen them: a part of its row.

    For each replica: its epoch and, of each counter, how much of this life is in the sum, and the sum. All servers see
    the same reports, but one that was away may have missed some: the largest sum is the truth.
    """

    def __init__(self, table: NumberTable, row: int, first_column: int) -> None:
        self._table = table
        self._row = row
        self._first = first_column

    def observe(self, stats: EngineStats) -> None:
        """Take a report; one of an earlier life is ignored."""
        table, row = self._table, self._row
        base = self._first + stats.dp_rank * COLUMNS_PER_REPLICA
        # One more than the epoch: zero is a replica that was never seen.
        known_epoch = table.get(row, base)
        if stats.epoch + 1 < known_epoch:
            return
        if stats.epoch + 1 > known_epoch:
            for place in range(len(COUNTERS)):
                table.set(row, base + 1 + 2 * place, 0)
            table.set(row, base, stats.epoch + 1)
        for place, (_, read) in enumerate(COUNTERS.values()):
            seen_at, sum_at = base + 1 + 2 * place, base + 2 + 2 * place
            seen, count = table.get(row, seen_at), read(stats)
            if count > seen:
                # First what is seen: who is killed in between counts too little, and never twice.
                table.set(row, seen_at, count)
                table.add(row, sum_at, count - seen)

    def total(self, dp_rank: int, place: int) -> float:
        """Return the sum of one counter, by its place in COUNTERS."""
        column = self._first + dp_rank * COLUMNS_PER_REPLICA + 2 + 2 * place
        return max(self._table.column(column))


class ReplicaCollector(Collector):
    """Turns the newest report of each replica into series, at scrape time. Thread: the event loop."""

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], Mapping[int, EngineStats]],
        num_ready: Callable[[], int],
        totals: ReplicaTotals,
    ) -> None:
        self._model_name = model_name
        self._stats = stats
        self._num_ready = num_ready
        self._totals = totals

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
        for place, (name, (text, _)) in enumerate(COUNTERS.items()):
            counter = CounterMetricFamily(name, text, labels=["model_name", "dp_rank"])
            for dp_rank, _ in reports:
                counter.add_metric([self._model_name, str(dp_rank)], self._totals.total(dp_rank, place))
            yield counter
