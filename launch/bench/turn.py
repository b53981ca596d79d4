"""One turn of the ring benchmark: what is measured, the same for every transport. Standard library only.

Called by: ring.py for our ring, in its own process; and, loaded from this file, by the baselines in peers/, which
run in interpreters that do not have this package. That is why it imports nothing of the package.

A transport sends a payload to all readers and gathers a small answer of each, which holds the instant
(`time.monotonic_ns()`, one clock for the whole host) at which the payload was in the reader's hands. Before it
answers, each reader looks at one byte of each page, so that memory which was only promised does not count as read.

When a reader dies: the transport's error ends the turn.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

PAGE_BYTES = 4096
NUM_WARM_UP = 20
WARM_UP_BYTES = 72 << 20
"""Sent first, in pieces of 1 MiB: more than any transport's memory, each page of which costs more the first time."""
MIN_MESSAGES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """What one turn measures; durations in seconds.

    sizes:         payload bytes; a size is sent until `budget_s` is over or `max_messages` are through
    gaps_s:        idleness before each message whose wake-up is timed; empty: not measured
    gap_samples:   messages for each of `gaps_s`
    idle_window_s: over which the processor time of idle readers is counted; 0: not measured
    """

    sizes: tuple[int, ...]
    max_messages: int
    budget_s: float
    gaps_s: tuple[float, ...] = ()
    gap_samples: tuple[int, ...] = ()
    idle_window_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class TurnResult:
    """What one turn measured.

    round_trips_us: by size, from before the sending until the last answer
    wake_ups_us:    by gap, from before the sending until the payload is with the last reader
    busy_percent:   of one core, mean over the readers, in the first second after a message
    idle_percent:   the same from two seconds after the message on
    """

    round_trips_us: dict[str, list[float]] = field(default_factory=dict)
    wake_ups_us: dict[str, list[float]] = field(default_factory=dict)
    busy_percent: float | None = None
    idle_percent: float | None = None


class Transport(Protocol):
    """One writer, in this process, and its readers, each a process."""

    @property
    def reader_pids(self) -> Sequence[int]: ...

    def round_trip(self, payload: bytes) -> list[int]:
        """Send to all, gather all answers. Returns the readers' instants."""
        ...


def run_turn(transport: Transport, plan: TurnPlan) -> TurnResult:
    """Measure all that `plan` names."""
    result = TurnResult()
    piece = bytes(1 << 20)
    for _ in range(WARM_UP_BYTES // len(piece)):
        transport.round_trip(piece)
    for size in plan.sizes:
        result.round_trips_us[str(size)] = _round_trips(transport, size, plan)
    small = bytes(64)
    for gap_s, samples in zip(plan.gaps_s, plan.gap_samples, strict=True):
        wake_ups = result.wake_ups_us[str(gap_s)] = []
        for _ in range(samples):
            # The idleness itself is what is measured.
            time.sleep(gap_s)
            began_at = time.monotonic_ns()
            wake_ups.append((max(transport.round_trip(small)) - began_at) / 1e3)
    if plan.idle_window_s:
        transport.round_trip(small)
        result.busy_percent = _cpu_percent(transport.reader_pids, 1.0)
        time.sleep(1.0)
        result.idle_percent = _cpu_percent(transport.reader_pids, plan.idle_window_s)
    return result


def _round_trips(transport: Transport, size: int, plan: TurnPlan) -> list[float]:
    payload = b"\x5a" * size
    for _ in range(NUM_WARM_UP if size < 1 << 20 else 2):
        transport.round_trip(payload)
    samples: list[float] = []
    end_at = time.monotonic_ns() + int(plan.budget_s * 1e9)
    while len(samples) < plan.max_messages:
        began_at = time.monotonic_ns()
        if began_at >= end_at and len(samples) >= MIN_MESSAGES:
            break
        transport.round_trip(payload)
        samples.append((time.monotonic_ns() - began_at) / 1e3)
    return samples


def _cpu_percent(pids: Sequence[int], window_s: float) -> float:
    """Return the processor time of `pids` over a window, in percent of one core, mean over the processes."""
    began_at, before = time.monotonic(), sum(map(_cpu_ns, pids))
    time.sleep(window_s)
    spent_ns = sum(map(_cpu_ns, pids)) - before
    return spent_ns / 1e7 / (time.monotonic() - began_at) / len(pids)


def _cpu_ns(pid: int) -> int:
    """Return the time that all threads of a process have run, in nanoseconds: finer than the kernel's ticks."""
    return sum(
        int(path.read_text(encoding="ascii").split()[0])
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )
