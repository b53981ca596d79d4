"""Attention of rows with several new tokens over a paged KV cache in one Triton kernel, for CUDA.

Called by: the "triton" attention backend, once per layer and step, on the worker's main thread. A program computes
`QUERIES` new tokens of one row for one query head: its keys and values are those of the row's blocks up to its last
query, read tile by tile. Causal, with or without a window. Formula: online softmax, Milakov and Gimelshein 2018.
"""

import torch
import triton
import triton.language as tl

from .decode_attention import LOG2_E, NO_WINDOW

_TILE = 64


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend from every new token to the tokens of its row that it sees, up to itself.

    q:                [num_tokens, num_heads, head_size], contiguous; heads that share a KV head lie side by side
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_size], of any strides but the last, which is 1
    block_tables:     [num_rows, max_blocks] int32, rows of any stride; entries without visible tokens are not read
    kv_lens:          [num_rows] int32, tokens of each row, the new ones included
    query_starts:     [num_rows + 1] int32, where each row's new tokens begin in q, and the last one's end
    max_query_len:    of the rows, or more, on the host
    window:           tokens that a query sees at most, itself among them; None: all
    returns           like q; undefined where no token of these rows stands
    """
    num_rows = kv_lens.shape[0]
    _, num_heads, head_size = q.shape
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    out = torch.empty_like(q)
    head_pad = max(16, triton.next_power_of_2(head_size))
    is_wide = head_pad > 128 or q.dtype == torch.float32
    queries = 64 if is_wide else 128
    grid = (triton.cdiv(max_query_len, queries), num_heads, num_rows)
    _prefill_kernel[grid](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        kv_lens,
        query_starts,
        scale * LOG2_E,
        NO_WINDOW if window is None else window,
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_SIZE=head_size,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size,
        QUERIES=queries,
        TILE=32 if is_wide else _TILE,
        num_warps=4 if is_wide else 8,
        num_stages=2,
    )
    return out


@triton.jit(do_not_specialize=["window", "stride_table"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tables_ptr,
    kv_lens_ptr,
    query_starts_ptr,
    scale_log2,
    window,
    stride_k_block,
    stride_k_token,
    stride_k_head,
    stride_v_block,
    stride_v_token,
    stride_v_head,
    stride_table,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(2)
    head = tl.program_id(1)
    query_start = tl.load(query_starts_ptr + row)
    query_len = tl.load(query_starts_ptr + row + 1) - query_start
    kv_len = tl.load(kv_lens_ptr + row)
    # The last queries see most keys; they go first.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    if first_query >= query_len:
        return

    query = first_query + tl.arange(0, QUERIES)
    dims = tl.arange(0, HEAD_PAD)
    in_tile = tl.arange(0, TILE)
    is_dim = dims < HEAD_SIZE
    is_element = (query < query_len)[:, None] & is_dim[None, :]
    q_offsets = ((query_start + query).to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_SIZE + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=is_element, other=0.0)
    k_head_ptr = k_ptr + (head // GROUP).to(tl.int64) * stride_k_head
    v_head_ptr = v_ptr + (head // GROUP).to(tl.int64) * stride_v_head
    table_ptr = tables_ptr + row.to(tl.int64) * stride_table

    # A query at a position sees the keys after position - window, up to its own.
    position = kv_len - query_len + query
    first_key = tl.maximum(kv_len - query_len + first_query - window + 1, 0)
    end_key = tl.minimum(kv_len - query_len + first_query + QUERIES, kv_len)
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    accumulated = tl.zeros([QUERIES, HEAD_PAD], tl.float32)
    for start in range(first_key // TILE * TILE, end_key, TILE):
        keys = start + in_tile
        is_key = (keys >= first_key) & (keys < end_key)
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        k_offsets = block * stride_k_block + keys % BLOCK_SIZE * stride_k_token
        v_offsets = block * stride_v_block + keys % BLOCK_SIZE * stride_v_token
        # A masked value is loaded as zero: times a probability of zero, what else lies there might be NaN.
        mask = is_key[:, None] & is_dim[None, :]
        k = tl.load(k_head_ptr + k_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        v = tl.load(v_head_ptr + v_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, k.T, input_precision="ieee") * scale_log2
        is_seen = (keys[None, :] <= position[:, None]) & (keys[None, :] > position[:, None] - window)
        scores = tl.where(is_seen & is_key[None, :], scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # Nothing seen yet, as before a window: a finite stand-in keeps the differences from being NaN.
        base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        accumulated = accumulated * shrink[:, None]
        accumulated = tl.dot(weights.to(v.dtype), v, accumulated, input_precision="ieee")
        largest = new_largest
    # Padding sees its row's last keys or none.
    result = accumulated / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + q_offsets, result.to(out_ptr.dtype.element_ty), mask=is_element)
