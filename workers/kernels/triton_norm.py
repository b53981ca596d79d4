"""Residual add and root-mean-square norm in one Triton kernel, for CUDA: each row is read and written once.

Called by: kernels/ops.py. The reference is kernels/rms_norm.py, with the same roundings in the same places.
"""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, let_next_come, wait_for_previous


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    *,
    is_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised sum of `x` and `residual`, and the sum (`x` itself without a residual).

    x:         [rows, size], rows of any stride; residual: the same shape, contiguous; weight: [size]; one dtype
               or with a residual [parts, rows, size] float32, contiguous: their sum, rounded, is meant
    is_offset: scale by 1 + weight in float32, as `offset_rms_norm`
    """
    rows, size = x.shape[-2:]
    parts = x.shape[0] if x.dim() == 3 else 0
    assert not parts or residual is not None
    normalized = torch.empty((rows, size), dtype=weight.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normalized)
    if rows == 0:
        return normalized, total
    size_pad = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        normalized,
        total,
        x.stride(-2),
        rows,
        epsilon,
        SIZE=size,
        SIZE_PAD=size_pad,
        PARTS=parts,
        HAS_RESIDUAL=residual is not None,
        IS_OFFSET=is_offset,
        num_warps=min(16, max(1, size_pad // 256)),
        **dependent_launch(x.device),
    )
    return normalized, total


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normalized_ptr,
    total_ptr,
    stride_x,
    rows,
    epsilon,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_OFFSET: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    let_next_come(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PAD)
    mask = column < SIZE
    dtype = normalized_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    if PARTS == 0:
        x = tl.load(x_ptr + row * stride_x + column, mask=mask, other=0.0)
    else:
        sums = tl.zeros([SIZE_PAD], tl.float32)
        for part in tl.static_range(PARTS):
            sums += tl.load(x_ptr + (part * rows + row) * stride_x + column, mask=mask, other=0.0)
        x = sums.to(dtype)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * SIZE + column, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + row * SIZE + column, x, mask=mask)
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)
    if IS_OFFSET:
        result = wide * (1.0 + weight.to(tl.float32))
    else:
        result = weight.to(tl.float32) * wide.to(dtype).to(tl.float32)
    tl.store(normalized_ptr + row * SIZE + column, result.to(dtype), mask=mask)
