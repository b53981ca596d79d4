"""Products of a few rows with a large weight in Triton, for CUDA: what decode at small batches is made of.

Called by: kernels/linear.py, for the shapes where these were measured to be faster than cuBLAS. Both read each weight
once and sum in float32, each output in one program: no atomics, and the same bits whatever runs beside it.

    rows    kernel
    1-4     `gemv`: a program multiplies a few weight rows, over their whole length, with every row of x
    5-64    `skinny_matmul`: rows padded to 16, 32 or 64 for the matrix units; a narrow strip of outputs a program
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

GEMV_MAX_ROWS = 4
SKINNY_MAX_ROWS = 64
_GEMV_ELEMENTS = 8192
"""Sums that a program of four warps keeps in registers, 64 for each thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTuning:
    """Layout of either kernel: outputs and inputs of one step of a program."""

    outputs: int
    inputs: int
    num_warps: int = 4
    num_stages: int = 4


def gemv_tuning(rows: int, outputs: int, inputs: int) -> LinearTuning:
    """Return the layout for x of so many rows and a weight of this size."""
    # Enough programs to keep every multiprocessor at work, twice over; then as much of a row as registers hold.
    strip = 8 if outputs >= 8 * 264 else 4 if outputs >= 4 * 264 else 2
    room = _GEMV_ELEMENTS // (strip * triton.next_power_of_2(rows))
    return LinearTuning(outputs=strip, inputs=min(room, 1024, triton.next_power_of_2(inputs)))


def skinny_tuning(outputs: int) -> LinearTuning:
    """Return the layout for a weight of so many outputs."""
    return LinearTuning(outputs=16 if outputs < 32 * 132 else 32, inputs=256)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tuning: LinearTuning | None = None,
) -> torch.Tensor:
    """x [1 to 4 rows, inputs], weight [outputs, inputs], both contiguous, bias [outputs] -> [rows, outputs]."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    assert 1 <= rows <= GEMV_MAX_ROWS
    tuning = tuning or gemv_tuning(rows, outputs, inputs)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    _gemv_kernel[(triton.cdiv(outputs, tuning.outputs),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        outputs,
        ROWS=rows,
        ROWS_PAD=triton.next_power_of_2(rows),
        INPUTS=inputs,
        BLOCK_OUTPUTS=tuning.outputs,
        BLOCK_INPUTS=tuning.inputs,
        HAS_BIAS=bias is not None,
        NUM_STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
    )
    return out


def skinny_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tuning: LinearTuning | None = None,
) -> torch.Tensor:
    """x [1 to 64 rows, inputs], weight [outputs, inputs], both contiguous, bias [outputs] -> [rows, outputs]."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    assert 1 <= rows <= SKINNY_MAX_ROWS
    tuning = tuning or skinny_tuning(outputs)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    _skinny_kernel[(triton.cdiv(outputs, tuning.outputs),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        outputs,
        ROWS_PAD=max(16, triton.next_power_of_2(rows)),
        INPUTS=inputs,
        BLOCK_OUTPUTS=tuning.outputs,
        BLOCK_INPUTS=tuning.inputs,
        HAS_BIAS=bias is not None,
        NUM_STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
    )
    return out


@triton.jit(do_not_specialize=["outputs"])
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    outputs,
    ROWS: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    column = tl.arange(0, BLOCK_INPUTS)
    row = tl.arange(0, ROWS_PAD)
    is_output = output < outputs
    weight_row_ptr = weight_ptr + output.to(tl.int64)[:, None] * INPUTS
    # Sums of a thread's own columns; added across threads once, at the end.
    sums = tl.zeros([ROWS_PAD, BLOCK_OUTPUTS, BLOCK_INPUTS], tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_INPUTS, num_stages=NUM_STAGES):
        inner = start + column
        if INPUTS % BLOCK_INPUTS == 0:
            weight = tl.load(weight_row_ptr + inner[None, :], mask=is_output[:, None], other=0.0)
            x = tl.load(x_ptr + row[:, None] * INPUTS + inner[None, :], mask=(row < ROWS)[:, None], other=0.0)
        else:
            is_inner = inner < INPUTS
            weight = tl.load(
                weight_row_ptr + inner[None, :], mask=is_output[:, None] & is_inner[None, :], other=0.0
            )
            x = tl.load(
                x_ptr + row[:, None] * INPUTS + inner[None, :],
                mask=(row < ROWS)[:, None] & is_inner[None, :],
                other=0.0,
            )
        sums += x.to(tl.float32)[:, None, :] * weight.to(tl.float32)[None, :, :]
    # [ROWS_PAD, BLOCK_OUTPUTS]
    result = tl.sum(sums, 2)
    if HAS_BIAS:
        result += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + row[:, None] * outputs + output[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=(row < ROWS)[:, None] & is_output[None, :],
    )


@triton.jit(do_not_specialize=["rows", "outputs"])
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outputs,
    ROWS_PAD: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    column = tl.arange(0, BLOCK_INPUTS)
    row = tl.arange(0, ROWS_PAD)
    is_output, is_row = output < outputs, row < rows
    weight_row_ptr = weight_ptr + output.to(tl.int64)[:, None] * INPUTS
    sums = tl.zeros([ROWS_PAD, BLOCK_OUTPUTS], tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_INPUTS, num_stages=NUM_STAGES):
        inner = start + column
        is_weight, is_x = is_output[:, None], is_row[:, None]
        if INPUTS % BLOCK_INPUTS != 0:
            is_inner = (inner < INPUTS)[None, :]
            is_weight, is_x = is_weight & is_inner, is_x & is_inner
        weight = tl.load(weight_row_ptr + inner[None, :], mask=is_weight, other=0.0)
        x = tl.load(x_ptr + row[:, None] * INPUTS + inner[None, :], mask=is_x, other=0.0)
        sums = tl.dot(x, weight.T, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + row[:, None] * outputs + output[None, :],
        sums.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )
