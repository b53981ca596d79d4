"""Products of a few dozen to a few hundred rows with a weight, left in parts for the norm that follows. For CUDA.

Called by: kernels/ops.py, for the shapes where this was measured to be faster than cuBLAS and a norm. So few rows are
multiplied in less time than the weight takes to come from memory, for which every multiprocessor must read; where a
weight has too few rows for that, its columns are dealt out as well, and each program has a part of every sum only.
cuBLAS adds the parts up in a kernel of its own. Here the norm does (triton_norm.py), which reads the sums anyway.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsTuning:
    """Layout of the kernel: rows of the weight and columns of one step of a program, and parts of the columns."""

    outputs: int
    inputs: int
    parts: int
    num_stages: int
    num_warps: int


def tuning_for(rows: int, outputs: int, inputs: int) -> PartsTuning | None:
    """Return the layout that was measured to be faster than cuBLAS on an H200; None: there is none."""
    return None


def product_in_parts(x: torch.Tensor, weight: torch.Tensor, tuning: PartsTuning) -> torch.Tensor:
    """x [1 to 256 rows, inputs], weight [outputs, inputs] -> [parts, rows, outputs] float32, whose sum it is.

    Both contiguous, of one 16-bit type; inputs: a multiple of 8.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    assert 1 <= rows <= MAX_ROWS
    rows_high, rows_low = padded_rows(rows)
    sums = torch.empty((tuning.parts, rows, outputs), dtype=torch.float32, device=x.device)
    high = TensorDescriptor.from_tensor(x, [rows_high, tuning.inputs])
    low = TensorDescriptor.from_tensor(x, [rows_low, tuning.inputs]) if rows_low else high
    _parts_kernel[(triton.cdiv(outputs, tuning.outputs), tuning.parts)](
        high,
        low,
        TensorDescriptor.from_tensor(weight, [tuning.outputs, tuning.inputs]),
        sums,
        rows,
        OUTPUTS=outputs,
        INPUTS=inputs,
        ROWS_HIGH=rows_high,
        ROWS_LOW=rows_low,
        BLOCK_OUTPUTS=tuning.outputs,
        BLOCK_INPUTS=tuning.inputs,
        PARTS=tuning.parts,
        NUM_STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
    )
    return sums


def padded_rows(rows: int) -> tuple[int, int]:
    """Return two tiles of rows that hold so many, each a power of two or, the second, none.

    A product of 136 rows takes 128 and 16 of them, not 256. Few kinds: each is a kernel to compile.
    """
    if rows <= 64:
        return 64, 0
    if rows <= 128:
        return 128, 0
    if rows <= 144:
        return 128, 16
    return (128, 64) if rows <= 192 else (256, 0)


@triton.jit(do_not_specialize=["rows"])
def _parts_kernel(
    x_high,
    x_low,
    weight,
    sums_ptr,
    rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS_HIGH: tl.constexpr,
    ROWS_LOW: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    output, part = tl.program_id(0) * BLOCK_OUTPUTS, tl.program_id(1)
    steps: tl.constexpr = (INPUTS + BLOCK_INPUTS * PARTS - 1) // (BLOCK_INPUTS * PARTS)
    # The weight's rows are those of the product: of them there are always enough to fill the matrix units.
    high = tl.zeros([BLOCK_OUTPUTS, ROWS_HIGH], tl.float32)
    if ROWS_LOW > 0:
        low = tl.zeros([BLOCK_OUTPUTS, ROWS_LOW], tl.float32)
    # Past an end of a tensor its descriptor reads zeros.
    for step in tl.range(0, steps, num_stages=NUM_STAGES):
        column = (part * steps + step) * BLOCK_INPUTS
        tile = weight.load([output, column])
        high = tl.dot(tile, x_high.load([0, column]).T, high)
        if ROWS_LOW > 0:
            low = tl.dot(tile, x_low.load([ROWS_HIGH, column]).T, low)
    part_ptr = sums_ptr + part.to(tl.int64) * rows * OUTPUTS
    _store(part_ptr, high, 0, output, rows, OUTPUTS, ROWS_HIGH, BLOCK_OUTPUTS)
    if ROWS_LOW > 0:
        _store(part_ptr, low, ROWS_HIGH, output, rows, OUTPUTS, ROWS_LOW, BLOCK_OUTPUTS)


@triton.jit
def _store(
    part_ptr,
    sums,
    first_row,
    first_output,
    rows,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """Write sums [BLOCK_OUTPUTS, ROWS] as [rows, OUTPUTS]."""
    row = first_row + tl.arange(0, ROWS)
    output = first_output + tl.arange(0, BLOCK_OUTPUTS)
    tl.store(
        part_ptr + row[:, None] * OUTPUTS + output[None, :],
        tl.trans(sums),
        mask=(row < rows)[:, None] & (output < OUTPUTS)[None, :],
    )
