"""`cluster-bench startup`: how long a cluster takes from the command to being ready, and to stop again.

Called by: cli.py. Starts `cluster-launch` as its operator does, and reads what it prints: elsewhere than on a
terminal, each process's phases are lines on standard error.

When the cluster does not start: BenchError with its last words.
"""

import argparse
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from .errors import BenchError
from .options import positive
from .progress import Progress
from .report import ReportWriter, Table, show_number, show_spread
from .stats import over_runs

NAME = "startup"
HELP = "time from cluster-launch to ready, by phase, and to its end"
STOP_TIMEOUT_S = 60.0
_READY = re.compile(r"^ready after [\d.]+ s: ")
_PHASE = re.compile(r"^(?P<role>[a-z0-9]+(?: [a-z0-9]+)*): (?P<phase>[\w ]+)$")


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of one process's start; seconds since the command was run."""

    role: str
    name: str
    began_s: float
    duration_s: float


class StartupRun(msgspec.Struct, frozen=True, kw_only=True):
    """One start and stop.

    memory_bytes: proportional share of all processes together, when the cluster was ready
    """

    run: int
    ready_s: float
    stop_s: float
    memory_bytes: int
    phases: list[Phase]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--repetitions", type=positive, default=3, metavar="N", help="runs (3)")
    parser.add_argument("launch", nargs=argparse.REMAINDER, metavar="-- ...",
                        help="arguments of cluster-launch, after --")  # fmt: skip


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Measure and report. Raises BenchError."""
    launch = [word for word in arguments.launch if word != "--"]
    runs = []
    with Progress("startup", arguments.repetitions) as progress:
        for number in range(arguments.repetitions):
            progress.say(f"run {number + 1}")
            runs.append(measure_start(number, launch))
            progress.advance()
    writer.finish(
        benchmark="startup: from the command to ready",
        num_runs=arguments.repetitions,
        tables=make_tables(runs),
        runs=runs,
        out=sys.stdout,
        notes=["the files of the model are in the page cache from the second run on"],
    )


def measure_start(number: int, launch: Sequence[str]) -> StartupRun:
    """Start a cluster, wait until it is ready, and stop it."""
    command = [sys.executable, "-m", "phalanx.launch", "--port", "0", *launch]
    began_at = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        # A session of its own: Ctrl-C reaches the cluster from here, once, and not from the terminal as well.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            marks: list[tuple[float, str, str]] = []
            reader = threading.Thread(target=_read_phases, args=(process.stderr, marks, errors), daemon=True)
            reader.start()
            ready_at = _wait_ready(process.stdout)
            if ready_at is None:
                process.wait(STOP_TIMEOUT_S)
                reader.join(STOP_TIMEOUT_S)
                errors.seek(0)
                raise BenchError(f"cluster-launch ended with {process.returncode}: {errors.read()[-2000:]}")
            memory_bytes = _memory_of_tree(process.pid)
            stopping_at = time.monotonic()
            process.send_signal(signal.SIGINT)
            process.stdout.read()
            process.wait(STOP_TIMEOUT_S)
            stop_s = time.monotonic() - stopping_at
            reader.join(STOP_TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
    return StartupRun(
        run=number,
        ready_s=ready_at - began_at,
        stop_s=stop_s,
        memory_bytes=memory_bytes,
        phases=phases_of(marks, began_at, ready_at),
    )


def phases_of(marks: Sequence[tuple[float, str, str]], began_at: float, ready_at: float) -> list[Phase]:
    """Turn (instant, role, phase) into durations: a phase ends with its role's next, the last one when all is ready."""
    phases = []
    for index, (at, role, name) in enumerate(marks):
        if at > ready_at:
            continue
        later = (mark[0] for mark in marks[index + 1 :] if mark[1] == role)
        end_at = min(next(later, ready_at), ready_at)
        phases.append(Phase(role=role, name=name, began_s=at - began_at, duration_s=end_at - at))
    return phases


def make_tables(runs: Sequence[StartupRun]) -> list[Table]:
    """Lay out the runs: the whole, then each phase of each process."""
    whole = Table(
        title="Start and stop",
        columns=["what", "median [lowest-highest]"],
        rows=[
            ["seconds until ready", show_spread(over_runs(run.ready_s for run in runs))],
            ["seconds to stop", show_spread(over_runs(run.stop_s for run in runs))],
            ["memory when ready, MiB", show_spread(over_runs(run.memory_bytes / 2**20 for run in runs))],
        ],
        note="Memory: proportional set size of all processes together.",
    )
    rows = []
    for role, name in dict.fromkeys((phase.role, phase.name) for run in runs for phase in run.phases):
        own = [phase for run in runs for phase in run.phases if (phase.role, phase.name) == (role, name)]
        rows.append(
            [
                f"{role}: {name}",
                show_number(statistics.median(phase.began_s for phase in own)),
                show_spread(over_runs(phase.duration_s for phase in own)),
            ]
        )
    phases = Table(
        title="Phases",
        columns=["process: phase", "begins at s", "takes s"],
        rows=rows,
        note="A process's last phase lasts until the whole cluster is ready.",
    )
    return [whole, phases]


def _read_phases(stream: IO[str], marks: list[tuple[float, str, str]], errors: IO[str]) -> None:
    """Note when each phase was told. The body of a thread; ends with the stream."""
    for line in stream:
        at = time.monotonic()
        errors.write(line)
        if match := _PHASE.match(line.rstrip()):
            marks.append((at, match["role"], match["phase"]))
    errors.flush()


def _wait_ready(output: IO[str]) -> float | None:
    """Return when the cluster said that it serves; None: it ended instead."""
    for line in output:
        if _READY.match(line):
            return time.monotonic()
    return None


def _memory_of_tree(pid: int) -> int:
    """Return the proportional set size of a process and all its descendants."""
    total, todo = 0, [pid]
    while todo:
        current = Path(f"/proc/{todo.pop()}")
        try:
            rollup = (current / "smaps_rollup").read_text(encoding="ascii")
            total += (
                next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
            )
            for children in current.glob("task/*/children"):
                todo += map(int, children.read_text(encoding="ascii").split())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return total
