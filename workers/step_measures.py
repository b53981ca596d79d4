"""What one rank measures of its steps: when it had each and was done, and how long its sums over the ranks took.

Called by: measured_worker.py fills them in the worker process; a benchmark asks for them by the hooks named there.
Imports no torch. Instants are of time.monotonic(), which all processes of a host share; durations in microseconds.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from .intervals import overlap, total, unite

MEASURED_WORKER = "phalanx.workers.measured_worker:MeasuredWorker"
MEASURE_HOOKS = (
    "phalanx.workers.measured_worker:begin_measuring",
    "phalanx.workers.measured_worker:end_measuring",
)
GATHER = "gather"
"""Among the ways: an exchange that sums nothing."""

ExchangeKernels = Mapping[str, Sequence[str]]
"""By the way that an exchange takes, what its kernels' names hold."""


class MeasurePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    max_steps:  no step after so many is measured, however late the end is asked for
    with_sums:  also the sums over the ranks; on a GPU by a profiler, which slows steps down
    """

    max_steps: int
    with_sums: bool = False


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One step on one rank.

    step:        the engine's number
    received_at: its frame is decoded; done_at: its tokens are on the host
    device_us:   of a GPU between its end and the launch, or the end of the step before if that was later; on CPU the
                 launch, which computes
    idle_us:     the device had nothing to do before it; None for the first
    """

    step: int
    received_at: float
    done_at: float
    device_us: float
    idle_us: float | None


class SumTime(msgspec.Struct, frozen=True, array_like=True):
    """One sum over the ranks on one rank, the wait for slower ranks included.

    way:           which implementation
    overlapped_us: of its time, while other kernels ran on the same device
    """

    way: str
    us: float
    overlapped_us: float


class RankMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """All that one rank measured, in the order of the steps.

    sums:      empty unless they were asked for
    gather_us: of all steps together, in other exchanges than sums
    busy_us:   of all steps together, while any kernel ran; None unless sums were asked for
    """

    tp_rank: int
    steps: list[StepTimes]
    sums: list[SumTime]
    gather_us: float
    busy_us: float | None


class Kernel(NamedTuple):
    """One kernel that ran on a device, by a profiler's clock, in microseconds."""

    name: str
    start_us: float
    end_us: float


class DeviceTimes(NamedTuple):
    """What the kernels of some steps say. As the fields of RankMeasures."""

    sums: list[SumTime]
    gather_us: float
    busy_us: float


def sort_kernels(kernels: Sequence[Kernel], exchanges: ExchangeKernels) -> DeviceTimes:
    """Tell sums from other kernels by their names, and say how much of each sum others ran beside it."""
    summing: list[tuple[Kernel, str]] = []
    others = []
    gather_us = 0.0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        way = _way_of(kernel.name, exchanges)
        if way is None:
            others.append((kernel.start_us, kernel.end_us))
        elif way == GATHER:
            gather_us += kernel.end_us - kernel.start_us
        else:
            summing.append((kernel, way))
    computing = unite(others)
    sums = [
        SumTime(way, kernel.end_us - kernel.start_us, overlap((kernel.start_us, kernel.end_us), computing))
        for kernel, way in summing
    ]
    busy_us = total(unite((kernel.start_us, kernel.end_us) for kernel in kernels))
    return DeviceTimes(sums, gather_us, busy_us)


def _way_of(name: str, exchanges: ExchangeKernels) -> str | None:
    return next((way for way, parts in exchanges.items() if any(part in name for part in parts)), None)
