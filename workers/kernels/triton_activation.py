"""Gated activations in one Triton kernel, for CUDA: gate and up are read once, nothing is stored between.

Called by: kernels/ops.py. The references are kernels/silu_and_mul.py and kernels/gelu_and_mul.py.
"""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, wait_for_previous

_COLUMNS = 1024
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


def gated_activation(x: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    """SiLU, or GELU in its tanh approximation, of the first half of the last dimension times the second half.

    x: [num_tokens, 2 * size], contiguous; returns [num_tokens, size]. size may be 0.
    """
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    columns = min(_COLUMNS, triton.next_power_of_2(size))
    # Rows in the first dimension of the grid: the second takes 65,535 at most.
    _gated_activation_kernel[(num_tokens, triton.cdiv(size, columns))](
        x, out, SIZE=size, COLUMNS=columns, IS_GELU=is_gelu, num_warps=4, **dependent_launch(x.device)
    )
    return out


@triton.jit
def _gated_activation_kernel(
    x_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < SIZE
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * 2 * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * SIZE + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    if IS_GELU:
        # tanh(x) = 2 sigmoid(2x) - 1
        inner = _SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
        activated = gate * tl.sigmoid(2.0 * inner)
    else:
        activated = gate * tl.sigmoid(gate)
    result = activated.to(dtype).to(tl.float32) * up
    tl.store(out_ptr + row * SIZE + column, result.to(dtype), mask=mask)
