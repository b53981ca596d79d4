"""Products of five to 64 rows with a large weight in Triton, for Hopper: what decode at middling batches is made of.

Called by: kernels/ops.py, on the worker's main thread, for the shapes where this was measured to be faster than cuBLAS.
So few rows are multiplied in less time than the weight takes to come from memory, for which every multiprocessor must
read. Tiles of the weight are copied by its descriptor, and a program has the sums of its tile for all rows.

Where a weight has too few rows to employ all multiprocessors, its columns are dealt out as well, and each program has a
part of every sum only. cuBLAS adds the parts up in a kernel of its own, or reads with too few. Here the norm that comes
next adds them up (triton_norm.py).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .dependent_launch import dependent_launch, wait_for_previous

MIN_ROWS = 5
ROW_PADS = (16, 32, 64)
"""Rows that there are kernels for. Rows of padding are not free: past the end of x its descriptor copies slowly."""
MAX_ROWS = ROW_PADS[-1]
_PROGRAMS = 128
"""That the columns are dealt out for: nearly one for each multiprocessor of an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewRowsTuning:
    """Layout of the kernel: rows of the weight and columns of one step of a program, and parts of the columns."""

    parts: int = 1
    outputs: int = 64
    inputs: int = 128
    num_stages: int = 6
    num_warps: int = 4


def is_faster(rows: int, outputs: int, inputs: int) -> bool:
    """Say whether `product_of_few_rows` was measured to be faster than cuBLAS on an H200, each behind a norm.

    launch/bench/results/1x-h200-kernels-2026-11.md, with 8, 24 and 64 rows: 5.2, 5.4 and 5.7 µs instead of 6.3 to 6.5
    for 1024 -> 4096; 6.0, 6.2 and 6.6 instead of 7.1 to 7.4 for 1024 -> 6144; with 8 and 24 rows 16.7 and 17.2 instead
    of 18.1 and 18.7 for 4096 -> 6144. With more rows that one is as fast by cuBLAS; and 4096 -> 28672 is faster by it,
    which reads 92 % of what the card can.
    """
    if not MIN_ROWS <= rows <= MAX_ROWS or outputs < 4096 or inputs % 8 != 0 or inputs < 512:
        return False
    return outputs * inputs <= 1 << 23 or (rows <= 32 and outputs * inputs <= 1 << 25)


def tuning_for_parts(rows: int, outputs: int, inputs: int) -> FewRowsTuning | None:
    """Return the layout for a product and a norm that were measured to be faster so on an H200; None: they were not.

    launch/bench/results/1x-h200-kernels-2026-11.md, both, with 8, 24 and 64 rows: 4.8, 5.0 and 5.5 µs instead of 7.0
    for 2048 -> 1024; 5.3, 5.5 and 6.0 instead of 7.5 to 8.1 for 3072 -> 1024; 12.0, 12.4 and 13.0 instead of 14.0 to
    14.5 for 4096 -> 4096; 32.8, 33.4 and 34.9 instead of 34.4, 35.3 and 38.9 for 14336 -> 4096. With more rows cuBLAS
    is as fast or faster.
    """
    has_long_rows = inputs >= 2 * outputs or (inputs >= outputs and outputs * inputs >= 1 << 24)
    if not MIN_ROWS <= rows <= MAX_ROWS or outputs > 4096 or inputs % 8 != 0 or not has_long_rows:
        return None
    tuning = FewRowsTuning()
    tiles = triton.cdiv(outputs, tuning.outputs)
    parts = triton.next_power_of_2(_PROGRAMS // tiles + 1) // 2
    # A part of fewer steps than two ends before its loads are under way.
    parts = min(parts, inputs // (2 * tuning.inputs))
    return FewRowsTuning(parts=parts) if parts > 1 else None


def product_of_few_rows(
    x: torch.Tensor, weight: torch.Tensor, tuning: FewRowsTuning | None = None
) -> torch.Tensor:
    """x [1 to 64 rows, inputs], weight [outputs, inputs] -> [rows, outputs] of their type.

    Both contiguous, of one 16-bit type; inputs: a multiple of 8; tuning: of one part.
    """
    tuning = tuning or FewRowsTuning()
    assert tuning.parts == 1
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, tuning)
    return out


def product_in_parts(x: torch.Tensor, weight: torch.Tensor, tuning: FewRowsTuning) -> torch.Tensor:
    """As `product_of_few_rows`, but returns [parts, rows, outputs] float32, whose sum it is."""
    out = torch.empty((tuning.parts, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    _launch(x, weight, out, tuning)
    return out


def _launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tuning: FewRowsTuning) -> None:
    rows, (outputs, inputs) = x.shape[0], weight.shape
    assert 1 <= rows <= MAX_ROWS
    # Few kinds: each is a kernel to compile.
    rows_pad = next(pad for pad in ROW_PADS if pad >= rows)
    _few_rows_kernel[(triton.cdiv(outputs, tuning.outputs), tuning.parts)](
        TensorDescriptor.from_tensor(x, [rows_pad, tuning.inputs]),
        TensorDescriptor.from_tensor(weight, [tuning.outputs, tuning.inputs]),
        out,
        rows,
        ROWS_PAD=rows_pad,
        OUTPUTS=outputs,
        INPUTS=inputs,
        BLOCK_OUTPUTS=tuning.outputs,
        BLOCK_INPUTS=tuning.inputs,
        PARTS=tuning.parts,
        NUM_STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
        **dependent_launch(x.device),
    )


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x,
    weight,
    out_ptr,
    rows,
    ROWS_PAD: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    first_output, part = tl.program_id(0) * BLOCK_OUTPUTS, tl.program_id(1)
    steps: tl.constexpr = (INPUTS + BLOCK_INPUTS * PARTS - 1) // (BLOCK_INPUTS * PARTS)
    # The weight's rows are those of the product: of them there are always enough to fill the matrix units.
    sums = tl.zeros([BLOCK_OUTPUTS, ROWS_PAD], tl.float32)
    # Past an end of a tensor its descriptor reads zeros.
    for step in tl.range(0, steps, num_stages=NUM_STAGES):
        column = (part * steps + step) * BLOCK_INPUTS
        sums = tl.dot(weight.load([first_output, column]), x.load([0, column]).T, sums)
    row = tl.arange(0, ROWS_PAD)
    output = first_output + tl.arange(0, BLOCK_OUTPUTS)
    tl.store(
        out_ptr + (part.to(tl.int64) * rows + row)[:, None] * OUTPUTS + output[None, :],
        tl.trans(sums).to(out_ptr.dtype.element_ty),
        mask=(row < rows)[:, None] & (output < OUTPUTS)[None, :],
    )
