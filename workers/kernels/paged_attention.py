"""Attention over a paged KV cache. Plain torch, for every device: the "torch" backend.

Called by: layers/attention.py, once per layer and step, after write_kv. One call of
scaled_dot_product_attention, or of row_attention.py, per group of alike rows; see forward_context.py for the groups.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..forward_context import AttentionGroup
from .row_attention import row_attention


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    groups: Sequence[AttentionGroup],
    *,
    scale: float,
) -> torch.Tensor:
    """Attend from every new token to the tokens of its row up to itself that its group shows it.

    q:                [num_tokens, num_heads, head_size]; heads that share a KV head lie side by side
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_size]
    returns           [num_tokens, num_heads, head_size]
    """
    k_slots, v_slots = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    if len(groups) == 1 and groups[0].is_whole:
        return _attend(q, k_slots, v_slots, groups[0], scale)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for group in groups:
        queries = q.index_select(0, group.query_index)
        result = _attend(queries, k_slots, v_slots, group, scale)
        if group.output_index is None:
            output.index_copy_(0, group.query_index, result)
        else:
            real = group.output_index
            output.index_copy_(0, group.query_index.index_select(0, real), result.index_select(0, real))
    return output


def _attend(
    q: torch.Tensor, k_slots: torch.Tensor, v_slots: torch.Tensor, group: AttentionGroup, scale: float
) -> torch.Tensor:
    """One group. q: [R * Q, num_heads, head_size]; k_slots, v_slots: [num_slots, num_kv_heads, head_size]."""
    if _is_for_row_attention(q, group):
        num_kv_heads = k_slots.shape[1]
        index = group.head_index(num_kv_heads, q.shape[1] // num_kv_heads)
        return row_attention(q, k_slots, v_slots, index, scale=scale)
    k, v = _read(k_slots, group), _read(v_slots, group)
    # A long row has G times the mask when its group is folded, so its group goes into the batch instead.
    attend = _attend_in_batch if group.num_rows == 1 and group.query_len > 1 else _attend_folded
    return attend(q, k, v, group, scale)


def _is_for_row_attention(q: torch.Tensor, group: AttentionGroup) -> bool:
    """Say whether the group only decodes, on a CPU in float32, and has to gather what it reads."""
    is_decode = group.query_len == 1 and group.slot_range is None
    return is_decode and q.dtype == torch.float32 and q.device.type == "cpu"


def _read(cache: torch.Tensor, group: AttentionGroup) -> torch.Tensor:
    """Keys or values of a group: [num_slots, H, D] -> [R, H, K, D]."""
    if group.slot_range is not None:
        flat = cache.narrow(0, group.slot_range, group.kv_len)
    else:
        # As rows of one dimension, which torch copies faster.
        flat = cache.flatten(1).index_select(0, group.slots).unflatten(1, cache.shape[1:])
    return flat.unflatten(0, (group.num_rows, group.kv_len)).transpose(1, 2)


def _attend_folded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: AttentionGroup, scale: float
) -> torch.Tensor:
    """Queries that share a KV head become more query positions of it.

    q: [R * Q, H * G, D]; k, v: [R, H, K, D]; returns [R * Q, H * G, D]
    """
    num_rows, query_len = group.num_rows, group.query_len
    num_kv_heads, head_size = k.shape[1], k.shape[3]
    group_size = q.shape[1] // num_kv_heads
    # [R, Q, H, G, D] -> [R, H, G, Q, D] -> [R, H, G * Q, D]
    folded = q.reshape(num_rows, query_len, num_kv_heads, group_size, head_size).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(num_rows, num_kv_heads, group_size * query_len, head_size)
    mask = group.mask
    if mask is not None:
        # [R, 1, Q, K] -> [R, 1, G * Q, K]; a view when Q is 1
        mask = mask.unsqueeze(2).expand(-1, -1, group_size, -1, -1).reshape(num_rows, 1, -1, group.kv_len)
    result = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    result = result.view(num_rows, num_kv_heads, group_size, query_len, head_size).permute(0, 3, 1, 2, 4)
    return result.reshape(num_rows * query_len, -1, head_size)


def _attend_in_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: AttentionGroup, scale: float
) -> torch.Tensor:
    """One row; the G queries of a KV head are G entries of the batch that read the same keys.

    q: [Q, H * G, D]; k, v: [1, H, K, D]; returns [Q, H * G, D]
    """
    num_kv_heads, head_size = k.shape[1], k.shape[3]
    group_size = q.shape[1] // num_kv_heads
    # [Q, H, G, D] -> [G, H, Q, D]
    batch = q.reshape(group.query_len, num_kv_heads, group_size, head_size).permute(2, 1, 0, 3)
    k, v = k.expand(group_size, -1, -1, -1), v.expand(group_size, -1, -1, -1)
    result = F.scaled_dot_product_attention(
        batch, k, v, attn_mask=group.mask, is_causal=group.is_causal, scale=scale
    )
    return result.permute(2, 1, 0, 3).reshape(group.query_len, -1, head_size)
