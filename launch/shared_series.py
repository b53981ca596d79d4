"""Counters and histograms that several API servers count together, in shared memory.

Called by: metrics.py. Each server counts in a row of its own (shm/number_table.py); whichever is asked adds up all
rows, so all answer alike. A server that is started again goes on with its row, so no counter goes back when one dies,
and nothing that was counted is lost with it. Thread: the event loop of each.
"""

import bisect
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..shm.number_table import NumberTable
from .metric_series import Columns, CounterSeries, HistogramSeries


class SharedCounter:
    """One server's side of a counter family."""

    def __init__(self, table: NumberTable, row: int, series: CounterSeries, first_column: int) -> None:
        self._table = table
        self._row = row
        self._columns = {values: first_column + place for place, values in enumerate(series.label_values)}
        # What earlier processes of this row have counted.
        self._bases = {values: table.get(row, column) for values, column in self._columns.items()}

    def inc(self, amount: float = 1, *, labels: tuple[str, ...] = ()) -> None:
        """Count. Raises KeyError for labels that the family does not have."""
        self._table.add(self._row, self._columns[labels], amount)

    def follow(self, count: float, *, labels: tuple[str, ...] = ()) -> None:
        """Take over a number that this process counts elsewhere, from zero on. Not to be mixed with `inc`."""
        self._table.set(self._row, self._columns[labels], self._bases[labels] + count)


class SharedHistogram:
    """One server's side of a histogram."""

    def __init__(self, table: NumberTable, row: int, series: HistogramSeries, first_column: int) -> None:
        self._table = table
        self._row = row
        self._buckets = series.buckets
        self._first = first_column
        self._sum = first_column + series.num_columns - 1

    def observe(self, value: float) -> None:
        """Count one value."""
        self._table.add(self._row, self._first + bisect.bisect_left(self._buckets, value), 1)
        self._table.add(self._row, self._sum, value)


class SharedCollector(Collector):
    """Adds up the rows of all servers at scrape time. Every series has the label model_name."""

    def __init__(self, table: NumberTable, columns: Columns, model_name: str) -> None:
        self._table = table
        self._columns = columns
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        """Describe nothing: the registry then does not collect at registration."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Give one family for each series of the list."""
        for series in self._columns.series:
            first = self._columns.first(series.name)
            totals = [sum(self._table.column(column)) for column in range(first, first + series.num_columns)]
            if isinstance(series, CounterSeries):
                yield self._counter(series, totals)
            else:
                yield self._histogram(series, totals)

    def _counter(self, series: CounterSeries, totals: Sequence[float]) -> Metric:
        family = CounterMetricFamily(series.name, series.text, labels=["model_name", *series.label_names])
        for values, total in zip(series.label_values, totals, strict=True):
            if total or series.shows_zeros:
                family.add_metric([self._model_name, *values], total)
        return family

    def _histogram(self, series: HistogramSeries, totals: Sequence[float]) -> Metric:
        family = HistogramMetricFamily(series.name, series.text, labels=["model_name"])
        *counts, sum_of_values = totals
        buckets, so_far = [], 0.0
        for bound, count in zip((*series.buckets, "+Inf"), counts, strict=True):
            so_far += count
            buckets.append((str(bound), so_far))
        family.add_metric([self._model_name], buckets, sum_of_values)
        return family
