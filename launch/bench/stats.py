"""Statistics of samples and of runs. Pure.

Called by: every benchmark. Quantiles interpolate linearly between order statistics, as numpy's default does.
"""

import math
from collections.abc import Iterable, Sequence

import msgspec


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run's samples, in their own unit. All zero when there are none."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    p999: float = 0.0
    min: float = 0.0
    max: float = 0.0


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """One number over several runs: its median, the lowest and the highest."""

    median: float
    low: float
    high: float


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the value below which `part` (0 to 1) of `ordered` lies; `ordered` ascends and is not empty."""
    position = part * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarize(samples: Iterable[float]) -> Summary:
    """Take mean and quantiles of samples in any order."""
    ordered = sorted(samples)
    if not ordered:
        return Summary()
    return Summary(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=quantile(ordered, 0.50),
        p90=quantile(ordered, 0.90),
        p99=quantile(ordered, 0.99),
        p999=quantile(ordered, 0.999),
        min=ordered[0],
        max=ordered[-1],
    )


def over_runs(values: Iterable[float]) -> Spread:
    """Take the median and the ends of one number of each run. At least one run."""
    ordered = sorted(values)
    return Spread(median=quantile(ordered, 0.5), low=ordered[0], high=ordered[-1])
