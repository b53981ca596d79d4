"""`cluster-bench kernels`: the kernels of a decode step on this card, beside cuBLAS and FlashAttention-3.

Called by: cli.py. Each figure is a launch inside a CUDA graph; beside it stands the part of the card's read ceiling,
measured in the same run.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .errors import BenchError
from .options import positive
from .progress import Progress
from .report import ReportWriter, Table, show_number, show_spread
from .stats import over_runs

NAME = "kernels"
HELP = "time of single GPU kernels in CUDA graphs, and the part of the card's read ceiling that they reach"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--block-size", type=positive, default=64, metavar="N", help="tokens of a block (64)")
    parser.add_argument("--repetitions", type=positive, default=3, metavar="N", help="runs (3)")


def run(arguments: argparse.Namespace, writer: ReportWriter) -> None:
    """Measure and report. Raises BenchError without a GPU."""
    # Torch only comes with what is measured: this command line starts without it.
    torch: Any = import_module("torch")
    if not torch.cuda.is_available():
        raise BenchError("kernels are measured on a GPU, and there is no CUDA device here")
    bench: Any = import_module("...workers.kernel_bench", __package__)
    ceilings: list[float] = []
    attention: list[Any] = []
    products: list[Any] = []
    with Progress(NAME, 3 * arguments.repetitions) as progress:
        for number in range(arguments.repetitions):
            progress.say(f"run {number + 1}, read ceiling")
            ceilings.append(bench.read_ceiling())
            progress.advance()
            progress.say(f"run {number + 1}, attention")
            attention += bench.measure_decode_attention(block_size=arguments.block_size)
            progress.advance()
            progress.say(f"run {number + 1}, products")
            products += bench.measure_small_products()
            products += bench.measure_products_and_norms()
            products += bench.measure_norms_and_products()
            progress.advance()
    ceiling = over_runs(ceilings).median
    writer.finish(
        benchmark="kernels: one decode step's, in CUDA graphs",
        num_runs=arguments.repetitions,
        tables=[
            make_table("Decode attention, bf16, heads of 128", attention, ceiling),
            make_table("Products of a few rows, bf16", products, ceiling),
        ],
        runs={"read_bytes_per_s": ceilings, "attention": attention, "products": products},
        out=sys.stdout,
        notes=[f"read ceiling: {ceiling / 1e12:.2f} TB/s; blocks of {arguments.block_size} tokens"],
    )


def make_table(title: str, times: Sequence[Any], ceiling: float) -> Table:
    """Lay out kernel times: one row for each kernel and shape; ceiling in bytes a second."""
    rows = []
    for shape, kernel in dict.fromkeys((time.shape, time.kernel) for time in times):
        own = [time for time in times if (time.shape, time.kernel) == (shape, kernel)]
        rate = over_runs(time.bytes_per_s for time in own).median
        rows.append(
            [
                shape,
                kernel,
                show_spread(over_runs(time.time_us for time in own)),
                show_number(rate / 1e12),
                f"{100 * rate / ceiling:.0f} %",
            ]
        )
    return Table(title=title, columns=["shape", "kernel", "µs", "TB/s", "of the ceiling"], rows=rows)
