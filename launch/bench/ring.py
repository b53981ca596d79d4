"""`cluster-bench ring`: our ring beside other ways to tell all ranks something and hear back from each.

Called by: cli.py. Measures round trips (a payload to all readers, a small answer from each), how long sleeping
readers take to wake, and what idle readers cost. The systems take turns within each run, on the same machine, so
that a slow minute of the machine hits all of them. Nothing else runs in this process while a turn is measured.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from . import turn as turn_module
from .options import positive, positive_list
from .peer_process import PEERS, PeerProcess
from .progress import Progress
from .report import ReportWriter, Table, show_number, show_spread
from .ring_transport import RingTransport
from .stats import Spread, over_runs, summarize
from .turn import TurnPlan, TurnResult, run_turn

NAME = "ring"
HELP = "broadcast and gathered reply through shared memory, beside pipes, ZMQ and vLLM's MessageQueue"
OURS = "phalanx"
SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
READERS = (1, 2, 4, 8)
GAPS_S = (0.001, 0.1, 10.0)
_GAP_BUDGET_S = 10.0
"""Idleness that one turn spends on each gap, about: 1 to 200 messages."""
_MAX_GAP_SAMPLES = 200

Turn = Callable[[int, TurnPlan], TurnResult]
"""Measures one turn with that many readers."""


class CellRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one run measured for one system and number of readers, in microseconds and percent of a core.

    round_trip_*_us: by payload bytes; wake_up_*_us: by seconds of idleness before
    """

    run: int
    system: str
    num_readers: int
    round_trip_p50_us: dict[str, float]
    round_trip_p99_us: dict[str, float]
    wake_up_p50_us: dict[str, float]
    wake_up_max_us: dict[str, float]
    busy_percent: float | None
    idle_percent: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--sizes", type=positive_list, default=SIZES, metavar="BYTES,...", help="payload bytes"
    )
    parser.add_argument("--readers", type=positive_list, default=READERS, metavar="N,...", help="readers")
    parser.add_argument("--repetitions", type=positive, default=3, metavar="N", help="runs (3)")
    parser.add_argument("--messages", type=positive, default=2000, metavar="N",
                        help="most messages of one size in one turn (2000)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=0.5, metavar="S",
                        help="time for the messages of one size in one turn (0.5)")  # fmt: skip
    parser.add_argument("--idle-readers", type=positive_list, default=(4,), metavar="N,...",
                        help="where idle cost and wake-up are measured (4)")  # fmt: skip
    parser.add_argument("--gaps", type=_gaps, default=GAPS_S, metavar="S,...",
                        help="idleness before a wake-up that is timed (0.001,0.1,10)")  # fmt: skip
    parser.add_argument("--idle-window", type=float, default=5.0, metavar="S",
                        help="over which idle readers are watched; 0: not at all (5)")  # fmt: skip
    parser.add_argument("--vllm-python", metavar="PATH",
                        help="interpreter of an environment with vLLM; left out without it")  # fmt: skip
    parser.add_argument("--only", action="append", default=[], metavar="SYSTEM",
                        help="phalanx, pipe, zmq or vllm; may be repeated (all)")  # fmt: skip


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Measure and report. Raises BenchError or TransportError."""
    notes = [
        "round trip: from before the sending until the last reader's answer is here; payloads are bytes",
        "phalanx sends a typed frame with the payload beside it; its readers read in place, and so do ZMQ's. Pipe "
        "and vLLM hand the reader a copy, as their interfaces do. Every reader looks at one byte of each page",
    ]
    with ExitStack() as resources:
        turns: dict[str, Turn] = {}
        versions: dict[str, str] = {}
        for name, peer in _systems(arguments.vllm_python, arguments.only):
            if peer is None:
                turns[name] = _our_turn
                continue
            resources.enter_context(peer)
            versions |= peer.versions
            turns[name] = _peer_turn(peer)
        if arguments.vllm_python is None:
            notes.append("vLLM's MessageQueue was left out: no --vllm-python")
        runs = _measure(arguments, turns)
    writer.finish(
        benchmark="ring: broadcast and gathered reply",
        num_runs=arguments.repetitions,
        tables=make_tables(runs, list(turns)),
        runs=runs,
        out=sys.stdout,
        notes=notes,
        versions=versions,
    )


def make_tables(runs: Sequence[CellRun], systems: Sequence[str]) -> list[Table]:
    """Lay out what was measured: round trips by readers and size, wake-ups, idle cost."""
    tables = [
        _round_trip_table(runs, systems, num_readers)
        for num_readers in sorted({cell.num_readers for cell in runs})
    ]
    if any(cell.wake_up_p50_us for cell in runs):
        tables.append(_wake_up_table(runs, systems))
    if any(cell.idle_percent is not None for cell in runs):
        tables.append(_idle_table(runs, systems))
    return tables


def _systems(vllm_python: str | None, only: Sequence[str]) -> Iterator[tuple[str, PeerProcess | None]]:
    """Name the systems to measure, each with its process; ours has none."""
    scripts = {"pipe": (sys.executable, "pipe.py.txt"), "zmq": (sys.executable, "zmq_pubsub.py.txt")}
    if vllm_python is not None:
        scripts["vllm"] = (vllm_python, "vllm_queue.py.txt")
    if not only or OURS in only:
        yield OURS, None
    for name, (python, script) in scripts.items():
        if not only or name in only:
            arguments = [str(Path(turn_module.__file__).resolve()), str(PEERS / script)]
            # What vLLM would else look up or write outside: a host name, usage statistics.
            env = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
            yield name, PeerProcess(name, python, "harness.py.txt", arguments, env=env)


def _our_turn(num_readers: int, plan: TurnPlan) -> TurnResult:
    with RingTransport(num_readers) as transport:
        return run_turn(transport, plan)


def _peer_turn(peer: PeerProcess) -> Turn:
    def measure(num_readers: int, plan: TurnPlan) -> TurnResult:
        result: dict[str, Any] = peer.ask({"num_readers": num_readers, "plan": asdict(plan)})
        return TurnResult(**result)

    return measure


def _measure(arguments: argparse.Namespace, turns: dict[str, Turn]) -> list[CellRun]:
    samples = tuple(max(1, min(_MAX_GAP_SAMPLES, int(_GAP_BUDGET_S / gap_s))) for gap_s in arguments.gaps)
    cells = []
    with Progress("ring", arguments.repetitions * len(arguments.readers) * len(turns)) as progress:
        for number in range(arguments.repetitions):
            for num_readers in arguments.readers:
                is_idle_measured = num_readers in arguments.idle_readers
                plan = TurnPlan(
                    sizes=tuple(arguments.sizes),
                    max_messages=arguments.messages,
                    budget_s=arguments.seconds,
                    gaps_s=tuple(arguments.gaps) if is_idle_measured else (),
                    gap_samples=samples if is_idle_measured else (),
                    idle_window_s=arguments.idle_window if is_idle_measured else 0.0,
                )
                # Another one goes first in each run.
                names = list(turns)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    progress.say(f"run {number + 1}, {num_readers} readers, {name}")
                    cells.append(_cell(number, name, num_readers, turns[name](num_readers, plan)))
                    progress.advance()
    return cells


def _cell(number: int, name: str, num_readers: int, result: TurnResult) -> CellRun:
    trips = {size: summarize(samples) for size, samples in result.round_trips_us.items()}
    wakes = {gap: summarize(samples) for gap, samples in result.wake_ups_us.items()}
    return CellRun(
        run=number,
        system=name,
        num_readers=num_readers,
        round_trip_p50_us={size: summary.p50 for size, summary in trips.items()},
        round_trip_p99_us={size: summary.p99 for size, summary in trips.items()},
        wake_up_p50_us={gap: summary.p50 for gap, summary in wakes.items()},
        wake_up_max_us={gap: summary.max for gap, summary in wakes.items()},
        busy_percent=result.busy_percent,
        idle_percent=result.idle_percent,
    )


def _round_trip_table(runs: Sequence[CellRun], systems: Sequence[str], num_readers: int) -> Table:
    cells = [cell for cell in runs if cell.num_readers == num_readers]
    sizes = sorted({size for cell in cells for size in cell.round_trip_p50_us}, key=int)
    rows = []
    for size in sizes:
        row, medians = [show_size(int(size))], {}
        for system in systems:
            ours = [cell for cell in cells if cell.system == system]
            middle = over_runs(cell.round_trip_p50_us[size] for cell in ours)
            tail = over_runs(cell.round_trip_p99_us[size] for cell in ours)
            medians[system] = middle.median
            row += [show_spread(middle), show_number(tail.median)]
        row += [
            f"{medians[name] / medians[OURS]:.1f}×" for name in systems if name != OURS and OURS in medians
        ]
        rows.append(row)
    columns = ["payload"]
    for system in systems:
        columns += [f"{system} p50", f"{system} p99"]
    if OURS in systems:
        columns += [f"{system} / {OURS}" for system in systems if system != OURS]
    return Table(
        title=f"Round trip in µs, {num_readers} reader{'s' if num_readers > 1 else ''}",
        columns=columns,
        rows=rows,
    )


def _wake_up_table(runs: Sequence[CellRun], systems: Sequence[str]) -> Table:
    rows = []
    for num_readers in sorted({cell.num_readers for cell in runs if cell.wake_up_p50_us}):
        cells = [cell for cell in runs if cell.num_readers == num_readers]
        for gap in sorted({gap for cell in cells for gap in cell.wake_up_p50_us}, key=float):
            row = [f"{num_readers} readers after {float(gap):g} s"]
            for system in systems:
                own = [cell for cell in cells if cell.system == system]
                row.append(show_spread(over_runs(cell.wake_up_p50_us[gap] for cell in own)))
                row.append(show_number(statistics.median(cell.wake_up_max_us[gap] for cell in own)))
            rows.append(row)
    columns = ["idle before"]
    for system in systems:
        columns += [f"{system} p50", f"{system} max"]
    return Table(
        title="Wake-up in µs",
        columns=columns,
        rows=rows,
        note="From before the sending of 64 bytes until the last reader has them.",
    )


def _idle_table(runs: Sequence[CellRun], systems: Sequence[str]) -> Table:
    rows = []
    for system in systems:
        for num_readers in sorted({cell.num_readers for cell in runs if cell.idle_percent is not None}):
            own = [cell for cell in runs if (cell.system, cell.num_readers) == (system, num_readers)]
            spreads: list[Spread] = [
                over_runs(value for cell in own if (value := getattr(cell, name)) is not None)
                for name in ("busy_percent", "idle_percent")
            ]
            rows.append([f"{system}, {num_readers} readers", *map(show_spread, spreads)])
    return Table(
        title="Processor time of one idle reader, percent of a core",
        columns=["system", "first second after a message", "from two seconds after it on"],
        rows=rows,
    )


def show_size(num_bytes: int) -> str:
    """Write a size as people do."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:g} {name}"
    return f"{num_bytes} B"


def _gaps(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",") if part)
