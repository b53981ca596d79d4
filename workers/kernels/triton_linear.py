"""Products of one to four rows with a large weight in Triton, for CUDA: what decode at small batches is made of.

Called by: kernels/ops.py and kernels/linear.py, for the shapes where this was measured to be faster than cuBLAS. A
program multiplies a few weight rows, over their whole length, with every row of x: each weight is read once, the sum is
float32, there are no atomics, and the bits are the same whatever runs beside it.

What makes x may be part of the kernel: the norm before a projection, or the gated activation before the last one of an
MLP. Each program repeats that for itself, which takes less time than a kernel of its own and the gap before the next.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, wait_for_previous

MAX_ROWS = 4
_ELEMENTS = 8192
"""Sums that a program of four warps keeps in registers, 64 for each thread."""
_PLAIN = tl.constexpr(0)
_NORM = tl.constexpr(1)
_SILU = tl.constexpr(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvTuning:
    """Layout of the kernel: outputs and inputs of one step of a program."""

    outputs: int
    inputs: int
    num_warps: int = 4
    num_stages: int = 3


def tuning_for(rows: int, outputs: int, inputs: int) -> GemvTuning:
    """Return the layout for x of so many rows and a weight of this size, as measured best on an H200."""
    if outputs < 2048:
        strip = 2
    elif inputs <= 1024:
        strip = 4 if outputs < 65536 else 16
    else:
        strip = 8
    room = _ELEMENTS // (strip * triton.next_power_of_2(rows))
    most = 1024 if strip == 4 else 512
    return GemvTuning(outputs=strip, inputs=min(room, most, triton.next_power_of_2(inputs)))


def is_faster(rows: int, outputs: int, inputs: int) -> bool:
    """Say whether `gemv` was measured to be faster than cuBLAS on an H200."""
    if rows == 1:
        return inputs <= 1024 or outputs * inputs < 1 << 26
    return (rows == 2 and outputs <= 4096) or (rows <= MAX_ROWS and outputs <= 2048)


def takes_norm(rows: int, outputs: int, inputs: int) -> bool:
    """Say whether `norm_gemv` was: for long rows the norm, which each program repeats, takes more than it saves."""
    return inputs <= 2048 and is_faster(rows, outputs, inputs)


def takes_silu(rows: int, outputs: int, inputs: int) -> bool:
    """Say whether `silu_gemv` was."""
    return rows <= 2 and is_faster(rows, outputs, inputs)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tuning: GemvTuning | None = None,
) -> torch.Tensor:
    """x [1 to 4 rows, inputs], weight [outputs, inputs], both contiguous, bias [outputs] -> [rows, outputs]."""
    return _launch(x, weight, bias, tuning)


def norm_gemv(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    epsilon: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product of the normalised sum of `x` and `residual`, and the sum (`x` itself without a residual).

    x, residual: [1 to 4 rows, inputs], contiguous; otherwise see `triton_norm.add_rms_norm` and `gemv`
    """
    total = x if residual is None else torch.empty_like(x)
    out = _launch(
        x,
        weight,
        bias,
        None,
        prologue=1,
        residual=residual,
        norm_weight=norm_weight,
        total=total,
        epsilon=epsilon,
        is_offset=is_offset,
    )
    return out, total


def silu_gemv(gate_up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the product of SiLU of the first half of `gate_up` [rows, 2 * inputs] times the second half."""
    return _launch(gate_up, weight, bias, None, prologue=2)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tuning: GemvTuning | None,
    *,
    prologue: int = 0,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    epsilon: float = 0.0,
    is_offset: bool = False,
) -> torch.Tensor:
    rows, (outputs, inputs) = x.shape[0], weight.shape
    assert 1 <= rows <= MAX_ROWS
    assert x.is_contiguous() and weight.is_contiguous()  # noqa: PT018
    tuning = tuning or tuning_for(rows, outputs, inputs)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    _gemv_kernel[(triton.cdiv(outputs, tuning.outputs),)](
        x,
        x if residual is None else residual,
        x if norm_weight is None else norm_weight,
        x if total is None else total,
        weight,
        weight if bias is None else bias,
        out,
        outputs,
        epsilon,
        ROWS=rows,
        ROWS_PAD=triton.next_power_of_2(rows),
        INPUTS=inputs,
        BLOCK_OUTPUTS=tuning.outputs,
        BLOCK_INPUTS=tuning.inputs,
        PROLOGUE=prologue,
        HAS_RESIDUAL=residual is not None,
        IS_OFFSET=is_offset,
        HAS_BIAS=bias is not None,
        NUM_STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
        **dependent_launch(x.device),
    )
    return out


@triton.jit(do_not_specialize=["outputs"])
def _gemv_kernel(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    total_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    outputs,
    epsilon,
    ROWS: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    PROLOGUE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    column = tl.arange(0, BLOCK_INPUTS)
    row = tl.arange(0, ROWS_PAD)
    is_output, is_row = output < outputs, (row < ROWS)[:, None]
    dtype = out_ptr.dtype.element_ty
    weight_row_ptr = weight_ptr + output.to(tl.int64)[:, None] * INPUTS
    # No kernel writes weights: the first ones are on their way while the kernel before still ends.
    is_weight = is_output[:, None] & (column < INPUTS)[None, :]
    weight = tl.load(weight_row_ptr + column[None, :], mask=is_weight, other=0.0)
    wait_for_previous(IS_DEPENDENT)

    inverse = tl.zeros([ROWS_PAD, 1], tl.float32)
    if PROLOGUE == _NORM:
        squares = tl.zeros([ROWS_PAD, BLOCK_INPUTS], tl.float32)
        for start in range(0, INPUTS, BLOCK_INPUTS):
            inner = (start + column)[None, :]
            mask = is_row & (inner < INPUTS)
            offsets = row[:, None] * INPUTS + inner
            summed = _load_sum(x_ptr, residual_ptr, offsets, mask, HAS_RESIDUAL)
            squares += summed.to(tl.float32) * summed.to(tl.float32)
            if HAS_RESIDUAL:
                if tl.program_id(0) == 0:
                    tl.store(total_ptr + offsets, summed, mask=mask)
        inverse = tl.rsqrt(tl.sum(squares, 1) / INPUTS + epsilon)[:, None]

    # Sums of a thread's own columns; added across threads once, at the end.
    x = _load_x(
        x_ptr, residual_ptr, norm_weight_ptr, column, row, inverse,
        ROWS=ROWS, INPUTS=INPUTS, PROLOGUE=PROLOGUE, HAS_RESIDUAL=HAS_RESIDUAL, IS_OFFSET=IS_OFFSET,
    )  # fmt: skip
    sums = x.to(tl.float32)[:, None, :] * weight.to(tl.float32)[None, :, :]
    for start in tl.range(BLOCK_INPUTS, INPUTS, BLOCK_INPUTS, num_stages=NUM_STAGES):
        inner = start + column
        is_weight = is_output[:, None] & (inner < INPUTS)[None, :]
        weight = tl.load(weight_row_ptr + inner[None, :], mask=is_weight, other=0.0)
        x = _load_x(
            x_ptr, residual_ptr, norm_weight_ptr, inner, row, inverse,
            ROWS=ROWS, INPUTS=INPUTS, PROLOGUE=PROLOGUE, HAS_RESIDUAL=HAS_RESIDUAL, IS_OFFSET=IS_OFFSET,
        )  # fmt: skip
        sums += x.to(tl.float32)[:, None, :] * weight.to(tl.float32)[None, :, :]
    # [ROWS_PAD, BLOCK_OUTPUTS]
    result = tl.sum(sums, 2)
    if HAS_BIAS:
        result += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + row[:, None] * outputs + output[None, :],
        result.to(dtype),
        mask=is_row & is_output[None, :],
    )


@triton.jit
def _load_x(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    inner,
    row,
    inverse,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    PROLOGUE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_OFFSET: tl.constexpr,
):
    """Load columns `inner` of what is multiplied: [rows, columns]. inverse: of the root mean squares."""
    inner = inner[None, :]
    is_inner = inner < INPUTS
    is_x = (row < ROWS)[:, None] & is_inner
    dtype = x_ptr.dtype.element_ty
    if PROLOGUE == _SILU:
        offsets = row[:, None] * (2 * INPUTS) + inner
        gate = tl.load(x_ptr + offsets, mask=is_x, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + offsets + INPUTS, mask=is_x, other=0.0)
        x = ((gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up.to(tl.float32)).to(dtype)
    elif PROLOGUE == _NORM:
        summed = _load_sum(x_ptr, residual_ptr, row[:, None] * INPUTS + inner, is_x, HAS_RESIDUAL)
        scale = tl.load(norm_weight_ptr + inner, mask=is_inner, other=0.0).to(tl.float32)
        wide = summed.to(tl.float32) * inverse
        if IS_OFFSET:
            x = (wide * (1.0 + scale)).to(dtype)
        else:
            x = (scale * wide.to(dtype).to(tl.float32)).to(dtype)
    else:
        x = tl.load(x_ptr + row[:, None] * INPUTS + inner, mask=is_x, other=0.0)
    return x


@triton.jit
def _load_sum(x_ptr, residual_ptr, offsets, mask, HAS_RESIDUAL: tl.constexpr):
    """Load x, or the sum of x and the residual, rounded as it is stored."""
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    return x
