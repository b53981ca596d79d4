"""Numbers of one front end's routing as Prometheus series, read at scrape time.

Called by: ServerMetrics, with what `DpClient` knows.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..cluster.routing import RoutingReason


class RoutingCollector(Collector):
    """Decisions by reason, and the age of the loads that they were made on. Thread: the event loop."""

    def __init__(
        self,
        model_name: str,
        num_routed: Callable[[], Mapping[RoutingReason, int]],
        snapshot_age_s: Callable[[], float | None],
    ) -> None:
        self._model_name = model_name
        self._num_routed = num_routed
        self._snapshot_age_s = snapshot_age_s

    def describe(self) -> Iterable[Metric]:
        """Describe nothing: the registry then does not collect at registration."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Give one sample for each reason, those that never occurred included."""
        counter = CounterMetricFamily(
            "phalanx_routing_decisions", "Requests routed, by reason.", labels=["model_name", "reason"]
        )
        counts = self._num_routed()
        for reason in RoutingReason:
            counter.add_metric([self._model_name, reason], counts.get(reason, 0))
        yield counter
        age_s = self._snapshot_age_s()
        if age_s is not None:
            gauge = GaugeMetricFamily(
                "phalanx_load_snapshot_age_seconds",
                "Age of the newest load snapshot that this front end has.",
                labels=["model_name"],
            )
            gauge.add_metric([self._model_name], age_s)
            yield gauge
