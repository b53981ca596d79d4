"""Rows of a rank's part of the embedding table in one Triton kernel, for CUDA.

Called by: kernels/ops.py. The reference is kernels/embedding.py.
"""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, let_next_come, wait_for_previous

_COLUMNS = 1024


def embed_own_rows(token_ids: torch.Tensor, weight: torch.Tensor, first_row: int) -> torch.Tensor:
    """See `kernels.embedding.embed_own_rows`. token_ids contiguous, weight contiguous."""
    (num_tokens,), (num_rows, size) = token_ids.shape, weight.shape
    out = torch.empty((num_tokens, size), dtype=weight.dtype, device=weight.device)
    if num_tokens:
        columns = min(_COLUMNS, triton.next_power_of_2(size))
        _embed_kernel[(num_tokens, triton.cdiv(size, columns))](
            token_ids,
            weight,
            out,
            first_row,
            num_rows,
            SIZE=size,
            COLUMNS=columns,
            num_warps=4,
            **dependent_launch(weight.device),
        )
    return out


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _embed_kernel(
    token_ids_ptr,
    weight_ptr,
    out_ptr,
    first_row,
    num_rows,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    let_next_come(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(token_ids_ptr + token).to(tl.int64) - first_row
    is_own = (row >= 0) & (row < num_rows)
    values = tl.load(weight_ptr + row * SIZE + column, mask=(column < SIZE) & is_own, other=0.0)
    tl.store(out_ptr + token * SIZE + column, values, mask=column < SIZE)
