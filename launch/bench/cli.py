"""cluster-bench: measures this project, and others beside it, and writes down what it found.

Called by: the console script. One benchmark a command; each is a module of its own with NAME, HELP, `add_arguments`
and `run`. Exit codes: 0 done, 1 failed, 2 bad arguments, 130 interrupted.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ...shm.errors import ConfigError, ServingError
from ...shm.exit_codes import ExitCode
from . import (
    executor,
    failover,
    kernels,
    latency,
    multi_gpu,
    ring,
    sampler,
    scheduler,
    serve,
    startup,
    steps,
    throughput,
    torture,
)
from .report import PROGRAM, ReportWriter
from .routing import command as routing
from .routing import real as routing_real

BENCHMARKS: tuple[ModuleType, ...] = (
    serve,
    latency,
    throughput,
    startup,
    failover,
    torture,
    ring,
    executor,
    sampler,
    scheduler,
    kernels,
    steps,
    multi_gpu,
    routing,
    routing_real,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the result is the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser().parse_args(words)
    # As Ctrl-C: what a benchmark has started is stopped on its way out.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        arguments.run(arguments, ReportWriter(words, arguments.out))
    except ConfigError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    except (ServingError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    return ExitCode.OK


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of all benchmarks."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Measure a server, or a part of this one. Every result says where and how it was measured.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    for benchmark in BENCHMARKS:
        command = commands.add_parser(
            benchmark.NAME, help=benchmark.HELP, description=benchmark.HELP, allow_abbrev=False
        )
        benchmark.add_arguments(command)
        command.add_argument("--out", type=Path, metavar="STEM",
                             help="write STEM.json and STEM.md; none: only show")  # fmt: skip
        command.set_defaults(run=benchmark.run)
    return parser
