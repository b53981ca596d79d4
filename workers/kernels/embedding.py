"""Rows of a rank's part of the embedding table. Plain torch, for every device.

Called by: kernels/ops.py.
"""

import torch
import torch.nn.functional as F


def embed_own_rows(token_ids: torch.Tensor, weight: torch.Tensor, first_row: int) -> torch.Tensor:
    """Look up token ids; those whose row stands elsewhere give zeros.

    token_ids: [num_tokens] int32 or int64; weight: [rows of this rank, size], the first of them row `first_row` of
    the whole table; returns [num_tokens, size]
    """
    num_rows, size = weight.shape
    if num_rows == 0:
        return weight.new_zeros((token_ids.shape[0], size))
    local = token_ids - first_row
    is_foreign = (local < 0) | (local >= num_rows)
    hidden = F.embedding(local.masked_fill(is_foreign, 0), weight)
    return hidden.masked_fill(is_foreign.unsqueeze(-1), 0)
