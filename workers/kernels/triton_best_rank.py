"""Which rank has a row's best token, in one small Triton kernel, for CUDA.

Called by: decode_step.py, inside a CUDA graph. The reference is `best_of_all` of vocab_columns.py.
"""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, wait_for_previous


def best_rank(found: torch.Tensor, rows: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
    """Choose one token for each row out of what each rank has found, and note it as the row's last.

    found:       [n, ranks * 2] int64: of each rank its best score, the bits of a float64, and the token that has it
    rows:        [n] int64, of `last_tokens`: [all rows] int64, written
    returns      [n] int64; of equal scores the first rank's, which has the lower ids
    """
    num_rows, width = found.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=found.device)
    _kernel[(num_rows,)](
        found, rows, last_tokens, tokens, NUM_RANKS=width // 2, num_warps=1, **dependent_launch(found.device)
    )
    return tokens


@triton.jit
def _kernel(
    found_ptr, rows_ptr, last_tokens_ptr, tokens_ptr, NUM_RANKS: tl.constexpr, IS_DEPENDENT: tl.constexpr
):
    wait_for_previous(IS_DEPENDENT)
    at = tl.program_id(0)
    found_ptr += at.to(tl.int64) * NUM_RANKS * 2
    score = tl.load(found_ptr).to(tl.float64, bitcast=True)
    token = tl.load(found_ptr + 1)
    for rank in tl.static_range(1, NUM_RANKS):
        other = tl.load(found_ptr + 2 * rank).to(tl.float64, bitcast=True)
        token = tl.where(other > score, tl.load(found_ptr + 2 * rank + 1), token)
        score = tl.maximum(score, other)
    tl.store(tokens_ptr + at, token)
    tl.store(last_tokens_ptr + tl.load(rows_ptr + at), token)
