"""Store keys and values in the cache. Plain torch, for every device.

Called by: layers/attention.py, once per layer and step.
"""

import torch


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store this step's keys and values.

    k, v:              [num_tokens, num_kv_heads, head_size], cache dtype
    k_cache, v_cache:  [num_blocks, block_size, num_kv_heads, head_size], contiguous
    slot_mapping:      [num_tokens] int64, distinct, none in the null block
    """
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)
