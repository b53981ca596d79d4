"""`cluster-bench sampler`: what the choice of tokens costs, by rows and by what they ask for.

Called by: cli.py. The measuring is in workers/sampler_timing.py, in this process; torch is imported when it begins.
Beside ours: a sort of the vocabulary and torch.multinomial, and flashinfer's sampling where it is installed.
"""

import argparse
import sys
from collections.abc import Sequence

import msgspec

from .options import positive, positive_list
from .progress import Progress
from .report import ReportWriter, Table, show_number, show_spread
from .stats import over_runs

NAME = "sampler"
HELP = "time of the choice of tokens for a batch, on this device"
OURS = "phalanx"
ROWS = (1, 64, 256, 1024)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One system in one case; as SamplerTime of workers/sampler_timing.py."""

    case: str
    system: str
    num_rows: int
    vocab_size: int
    us: list[float]
    is_graph: bool
    problem: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--rows", type=positive_list, default=ROWS, metavar="N,...", help="in a batch")
    parser.add_argument("--vocab", type=positive, default=151_936, metavar="N", help="token ids (151936)")
    parser.add_argument("--repetitions", type=positive, default=5, metavar="N", help="runs (5)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU where there is one")
    parser.add_argument("--no-peers", action="store_true", help="measure ours alone")


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Measure and report."""
    # Only here: the other benchmarks must not wait for torch.
    from ...workers import sampler_timing

    cells = []
    device = sampler_timing.pick_device(arguments.device)
    with Progress("sampler", len(sampler_timing.CASES) * len(arguments.rows)) as progress:
        done: set[tuple[str, int]] = set()
        for time in sampler_timing.time_sampler(
            rows=arguments.rows,
            vocab_size=arguments.vocab,
            num_runs=arguments.repetitions,
            device=device,
            with_peers=not arguments.no_peers,
        ):
            if (time.case, time.num_rows) not in done:
                done.add((time.case, time.num_rows))
                progress.say(f"{time.case}, {time.num_rows} rows")
                progress.advance()
            cells.append(msgspec.convert(msgspec.to_builtins(time), Cell))
    writer.finish(
        benchmark="sampler: from logits to tokens",
        num_runs=arguments.repetitions,
        tables=[make_table(cells)],
        runs=cells,
        out=sys.stdout,
        notes=[
            f"on {device}, vocabulary {arguments.vocab}; logits in bfloat16 on a GPU, float32 on a CPU",
            "*: launched as it comes, because it waits for the device; the others inside a CUDA graph"
            if device.type == "cuda"
            else "no GPU: times of the host",
        ],
    )


def make_table(cells: Sequence[Cell]) -> Table:
    """Lay out the cells: one row for each case and number of rows."""
    systems = list(dict.fromkeys(cell.system for cell in cells))
    found = {(cell.case, cell.num_rows, cell.system): cell for cell in cells}
    on_gpu = any(cell.is_graph for cell in cells)
    rows = []
    for case, num_rows in dict.fromkeys((cell.case, cell.num_rows) for cell in cells):
        row = [f"{case}, {num_rows} rows"]
        medians: dict[str, float] = {}
        for system in systems:
            cell = found.get((case, num_rows, system))
            if cell is None or not cell.us:
                row.append(cell.problem if cell else "")
                continue
            spread = over_runs(cell.us)
            medians[system] = spread.median
            row.append(show_spread(spread) + ("*" if on_gpu and not cell.is_graph else ""))
        for system in systems:
            if system != OURS:
                has_both = system in medians and OURS in medians
                row.append(f"{show_number(medians[system] / medians[OURS])}×" if has_both else "")
        rows.append(row)
    columns = ["case", *systems, *(f"{system} / {OURS}" for system in systems if system != OURS)]
    return Table(title="One choice for all rows, in µs", columns=columns, rows=rows)
