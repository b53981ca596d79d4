"""Intervals of time on one device: their union, and how much of one lies in others. Pure, imports no torch.

Called by: step_measures.py. An interval is (start, end) in any unit, start <= end.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def unite(intervals: Iterable[Interval]) -> list[Interval]:
    """Return what any of them covers, as intervals that ascend and do not touch; empty ones are left out."""
    united: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        else:
            united.append((start, end))
    return united


def total(united: Iterable[Interval]) -> float:
    """Return the length of what `unite` returned."""
    return sum(end - start for start, end in united)


def overlap(interval: Interval, united: Sequence[Interval]) -> float:
    """Return how much of `interval` lies in `united`, which `unite` returned."""
    start, end = interval
    covered = 0.0
    # The last one that begins at or before `start` may reach into it.
    place = max(0, bisect_right(united, (start, float("inf"))) - 1)
    for other_start, other_end in united[place:]:
        if other_start >= end:
            break
        covered += max(0.0, min(end, other_end) - max(start, other_start))
    return covered
