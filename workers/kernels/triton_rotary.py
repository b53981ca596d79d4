"""Norm of queries and keys, rotary embedding and the write into the KV cache in one Triton kernel, for CUDA.

Called by: kernels/ops.py. The reference is layers/self_attention.py over kernels/rms_norm.py, layers/rotary.py and
kernels/kv_cache.py. The output of the joint projection is read once, and what attention reads is written once.
"""

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, let_next_come, wait_for_previous

_ELEMENTS = 1024
"""Of one program: a few heads of one token."""


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    num_heads: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
    is_offset: bool = False,
) -> torch.Tensor:
    """Return rotated queries [num_tokens, num_heads, head_size]; store rotated keys, and values.

    qkv:                [num_tokens, num_heads + 2 * num_kv_heads, head_size], contiguous
    cos, sin:           [num_tokens, 1, head_size / 2] float32, rows of any stride
    k_cache, v_cache:   [num_blocks, block_size, num_kv_heads, head_size], of any strides but the last, which is 1
    slot_mapping:       [num_tokens] int32 or int64, flat cache positions; negative: the token is not stored
    q_weight, k_weight: [head_size], norms of each head before it is rotated, both or none
    is_offset:          they scale by 1 + weight, as `offset_rms_norm`
    """
    num_tokens, all_heads, head_size = qkv.shape
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    queries = torch.empty((num_tokens, num_heads, head_size), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return queries
    half_pad = triton.next_power_of_2(head_size // 2)
    heads = max(1, min(_ELEMENTS // (2 * half_pad), triton.next_power_of_2(all_heads)))
    _rotate_and_store_kernel[(num_tokens, triton.cdiv(all_heads, heads))](
        qkv,
        cos,
        sin,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        queries,
        k_cache,
        v_cache,
        slot_mapping,
        cos.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        epsilon,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_size // 2,
        HALF_PAD=half_pad,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        HAS_NORM=q_weight is not None,
        IS_OFFSET=is_offset,
        num_warps=max(1, heads * half_pad // 128),
        **dependent_launch(qkv.device),
    )
    return queries


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    queries_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    stride_angle,
    stride_k_block,
    stride_k_token,
    stride_k_head,
    stride_v_block,
    stride_v_token,
    stride_v_head,
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_OFFSET: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    let_next_come(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, HALF_PAD)
    is_dim = dim < HALF
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    is_head = head < NUM_HEADS + 2 * NUM_KV_HEADS
    mask = is_head[:, None] & is_dim[None, :]
    dtype = queries_ptr.dtype.element_ty

    row_ptr = qkv_ptr + token * (NUM_HEADS + 2 * NUM_KV_HEADS) * 2 * HALF
    offsets = head[:, None] * (2 * HALF) + dim[None, :]
    first = tl.load(row_ptr + offsets, mask=mask, other=0.0)
    second = tl.load(row_ptr + offsets + HALF, mask=mask, other=0.0)
    cos = tl.load(cos_ptr + token * stride_angle + dim, mask=is_dim, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * stride_angle + dim, mask=is_dim, other=0.0)[None, :]
    slot = tl.load(slot_ptr + token).to(tl.int64)

    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(wide_first * wide_first + wide_second * wide_second, 1)
        inverse = tl.rsqrt(squares / (2 * HALF) + epsilon)[:, None]
        # [HEADS, HALF_PAD]: queries and keys may meet in one program.
        weights = tl.where(is_query, q_weight_ptr, k_weight_ptr)[:, None] + dim[None, :]
        first_weight = tl.load(weights, mask=is_dim[None, :], other=0.0).to(tl.float32)
        second_weight = tl.load(weights + HALF, mask=is_dim[None, :], other=0.0).to(tl.float32)
        wide_first, wide_second = wide_first * inverse, wide_second * inverse
        if IS_OFFSET:
            wide_first, wide_second = wide_first * (1.0 + first_weight), wide_second * (1.0 + second_weight)
        else:
            wide_first = first_weight * wide_first.to(dtype).to(tl.float32)
            wide_second = second_weight * wide_second.to(dtype).to(tl.float32)
        wide_first, wide_second = wide_first.to(dtype).to(tl.float32), wide_second.to(dtype).to(tl.float32)
    turned_first = (wide_first * cos - wide_second * sin).to(dtype)
    turned_second = (wide_second * cos + wide_first * sin).to(dtype)

    out = queries_ptr + token * NUM_HEADS * 2 * HALF + offsets
    tl.store(out, turned_first, mask=mask & is_query[:, None])
    tl.store(out + HALF, turned_second, mask=mask & is_query[:, None])
    if slot >= 0:
        block, in_block = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        k_head = (head - NUM_HEADS)[:, None].to(tl.int64)
        k_out = (
            k_ptr + block * stride_k_block + in_block * stride_k_token + k_head * stride_k_head + dim[None, :]
        )
        is_key = mask & (~is_query & ~is_value)[:, None]
        tl.store(k_out, turned_first, mask=is_key)
        tl.store(k_out + HALF, turned_second, mask=is_key)
        v_head = (head - NUM_HEADS - NUM_KV_HEADS)[:, None].to(tl.int64)
        v_out = (
            v_ptr + block * stride_v_block + in_block * stride_v_token + v_head * stride_v_head + dim[None, :]
        )
        tl.store(v_out, first, mask=mask & is_value[:, None])
        tl.store(v_out + HALF, second, mask=mask & is_value[:, None])
