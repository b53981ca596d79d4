"""Attention of rows with one new token each over a paged KV cache, in float32 on CPU.

Called by: kernels/paged_attention.py. As scaled_dot_product_attention over gathered keys and values, but values are
not gathered: embedding_bag, which adds up weighted rows of a table, reads them where they are. With 8 rows of 160
tokens, 4 KV heads and 12 query heads that takes two thirds of the time.
"""

from dataclasses import dataclass

import torch

_SUM = 0
"""A mode of embedding_bag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadIndex:
    """Where the keys and values of R rows with K tokens are, for H KV heads with G queries each.

    keys:   [R * H * K] int64, rows of the cache as [num_slots * H, head_size]
    values: [R * H * G * K] int32, the same for each query: faster than int64
    bags:   [R * H * G + 1] int32, where the values of each query begin
    mask:   [R * H, 1, K] float32, 0 or -inf; [1, 1, 1] where every query sees every key
    """

    keys: torch.Tensor
    values: torch.Tensor
    bags: torch.Tensor
    mask: torch.Tensor


def make_head_index(
    slots: torch.Tensor, mask: torch.Tensor | None, *, num_rows: int, num_kv_heads: int, group_size: int
) -> HeadIndex:
    """slots: [R * K] int64; mask: [R, 1, 1, K]; both as in AttentionGroup."""
    kv_len = slots.numel() // num_rows
    heads = torch.arange(num_kv_heads).view(1, -1, 1)
    # [R, H, K]
    keys = slots.view(num_rows, 1, kv_len) * num_kv_heads + heads
    values = keys.int().unsqueeze(2).expand(-1, -1, group_size, -1)
    num_bags = num_rows * num_kv_heads * group_size
    if mask is None:
        mask = torch.zeros(1, 1, 1)
    else:
        mask = mask.expand(-1, num_kv_heads, -1, -1).reshape(-1, 1, kv_len)
    return HeadIndex(
        keys=keys.view(-1),
        values=values.reshape(-1),
        bags=torch.arange(num_bags + 1, dtype=torch.int32) * kv_len,
        mask=mask,
    )


def row_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, index: HeadIndex, *, scale: float
) -> torch.Tensor:
    """Attend from each row's token.

    q:                [R, H * G, head_size] float32
    k_cache, v_cache: [num_slots, H, head_size] float32, contiguous
    returns           like q
    """
    num_kv_heads, head_size = k_cache.shape[1:]
    num_rows, num_heads = q.shape[:2]
    k = k_cache.view(-1, head_size).index_select(0, index.keys).view(num_rows * num_kv_heads, -1, head_size)
    # [R, H * G, D] -> [R * H, G, D]
    queries = q.reshape(num_rows * num_kv_heads, num_heads // num_kv_heads, head_size)
    weights = torch.baddbmm(index.mask, queries, k.transpose(1, 2), alpha=scale).softmax(-1)
    # What `F.embedding_bag` calls in the end, without its checks: they are calls in Python, in each layer.
    output, *_ = torch.embedding_bag(
        v_cache.view(-1, head_size),
        index.values,
        index.bags,
        scale_grad_by_freq=False,
        mode=_SUM,
        sparse=False,
        per_sample_weights=weights.view(-1),
        include_last_offset=True,
    )
    return output.view_as(q)
