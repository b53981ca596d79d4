"""Products of a few rows with a weight of few and long rows, left in parts for the norm that follows. For CUDA.

Called by: kernels/ops.py, for the shapes where this was measured to be faster than cuBLAS and a norm. So few rows are
multiplied in less time than the weight takes to come from memory, for which every multiprocessor must read; where a
weight has too few rows for that, its columns are dealt out as well, and each program has a part of every sum only.
cuBLAS adds the parts up in a kernel of its own, or reads with too few. Here the norm adds them up (triton_norm.py).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .dependent_launch import dependent_launch, wait_for_previous

MIN_ROWS, MAX_ROWS = 5, 64
_PROGRAMS = 128
"""That the columns are dealt out for: nearly one for each multiprocessor of an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsTuning:
    """Layout of the kernel: rows of the weight and columns of one step of a program, and parts of the columns."""

    parts: int
    outputs: int = 64
    inputs: int = 128
    num_stages: int = 6
    num_warps: int = 4


def tuning_for(rows: int, outputs: int, inputs: int) -> PartsTuning | None:
    """Return the layout for a product and a norm that were measured to be faster so on an H200; None: they were not.

    Together, for 16 and 64 rows: 6.4 and 6.5 µs instead of 7.6 for 2048 -> 1024, 7.0 instead of 8.6 for 3072 -> 1024,
    34 and 36 instead of 35 and 40 for 14336 -> 4096. With 256 rows, or 4096 -> 4096, cuBLAS is as fast or faster.
    """
    if not MIN_ROWS <= rows <= MAX_ROWS or outputs > 4096 or inputs < 2 * outputs:
        return None
    tuning = PartsTuning(parts=1)
    tiles = triton.cdiv(outputs, tuning.outputs)
    parts = triton.next_power_of_2(_PROGRAMS // tiles + 1) // 2
    # A part of fewer steps than two ends before its loads are under way.
    parts = min(parts, inputs // (2 * tuning.inputs))
    return PartsTuning(parts=parts) if parts > 1 and inputs % 8 == 0 else None


def product_in_parts(x: torch.Tensor, weight: torch.Tensor, tuning: PartsTuning) -> torch.Tensor:
    """x [1 to 64 rows, inputs], weight [outputs, inputs] -> [parts, rows, outputs] float32, whose sum it is.

    Both contiguous, of one 16-bit type; inputs: a multiple of 8.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    assert 1 <= rows <= MAX_ROWS
    # Few kinds: each is a kernel to compile.
    rows_pad = 16 if rows <= 16 else MAX_ROWS
    sums = torch.empty((tuning.parts, rows, outputs), dtype=torch.float32, device=x.device)
    _parts_kernel[(triton.cdiv(outputs, tuning.outputs), tuning.parts)](
        TensorDescriptor.from_tensor(x, [rows_pad, tuning.inputs]),
        TensorDescriptor.from_tensor(weight, [tuning.outputs, tuning.inputs]),
        sums,
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
    return sums


@triton.jit(do_not_specialize=["rows"])
def _parts_kernel(
    x,
    weight,
    sums_ptr,
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
        sums_ptr + (part.to(tl.int64) * rows + row)[:, None] * OUTPUTS + output[None, :],
        tl.trans(sums),
        mask=(row < rows)[:, None] & (output < OUTPUTS)[None, :],
    )
