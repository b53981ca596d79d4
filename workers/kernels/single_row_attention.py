"""Attention of one new token over a paged KV cache where one row decodes: what counts is latency. For CUDA.

Called by: the "triton" attention backend, once per layer and step, for the batches that `splits_for` is for. As
decode_attention.py, which is for all others, but each program knows its part of a row before it knows the row's
length: the number of its first block, the length and the queries are read at the same time. On an H200, of 6.7 to 8 µs
for a row of 128 to 1024 tokens, that saves one to two. Of a short row most programs have nothing to do.

A row's tiles of one KV head are dealt out to `splits` programs in turn, and the one that finishes last adds the parts
up, in their order.
"""

import torch
import triton
import triton.language as tl

from .decode_attention import COMBINED_ELEMENTS, LOG2_E, DecodeScratch, attend_tile
from .dependent_launch import dependent_launch, wait_for_previous

MAX_ROWS = 1
_MAX_SPLITS = 16


def splits_for(
    scratch: DecodeScratch,
    *,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
) -> int:
    """Return in how many parts a row is read at most; 0: this batch is for `decode_attention`."""
    tuning = scratch.tuning
    if num_rows > MAX_ROWS or block_size % tuning.tile:
        return 0
    heads_pad = triton.next_power_of_2(num_heads // num_kv_heads)
    # One program for each multiprocessor; what they have found is loaded to be added up all at once, into registers.
    programs = tuning.num_programs // 2 // (num_rows * num_kv_heads)
    most = min(_MAX_SPLITS, programs, COMBINED_ELEMENTS // (heads_pad * triton.next_power_of_2(head_size)))
    return 1 << (most.bit_length() - 1) if most > 1 else 0


def single_row_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    scratch: DecodeScratch,
    *,
    splits: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Write `out`, contiguous. splits: of `splits_for`; the rest as of `decode_attention`, without a window.

    kv_lens and block_tables were written before the kernel that was launched last: they are read while that one ends.
    Of a row's table an entry past its tokens may be read, and leads nowhere.
    """
    num_rows, num_heads, head_size = q.shape
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = num_heads // num_kv_heads
    _single_row_kernel[(splits, num_kv_heads, num_rows)](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        kv_lens,
        scratch.accumulated,
        scratch.softmax,
        scratch.arrived,
        scale * LOG2_E,
        block_tables.shape[1] - 1,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        block_tables.stride(0),
        SPLITS=splits,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD_SIZE=head_size,
        HEAD_PAD=max(16, triton.next_power_of_2(head_size)),
        BLOCK_SIZE=block_size,
        TILE=scratch.tuning.tile,
        COMBINE_PAD=triton.next_power_of_2(group),
        NUM_STAGES=scratch.tuning.num_stages,
        num_warps=scratch.tuning.num_warps,
        **dependent_launch(q.device),
    )


@triton.jit(do_not_specialize=["last_entry", "stride_table"])
def _single_row_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tables_ptr,
    kv_lens_ptr,
    accumulated_ptr,
    softmax_ptr,
    arrived_ptr,
    scale_log2,
    last_entry,
    stride_q_row,
    stride_q_head,
    stride_k_block,
    stride_k_token,
    stride_k_head,
    stride_v_block,
    stride_v_token,
    stride_v_head,
    stride_table,
    SPLITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COMBINE_PAD: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    unit = row * NUM_KV_HEADS + head
    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, HEAD_PAD)
    in_tile = tl.arange(0, TILE)
    is_dim = dims < HEAD_SIZE
    is_query = (group < GROUP)[:, None] & is_dim[None, :]

    # None of these three waits for another. Two come past the first-level cache, which may be older.
    table_ptr = tables_ptr + row.to(tl.int64) * stride_table
    kv_len = tl.load(kv_lens_ptr + row, cache_modifier=".cg")
    first_entry = tl.minimum(split * TILE // BLOCK_SIZE, last_entry)
    block = tl.load(table_ptr + first_entry, cache_modifier=".cg").to(tl.int64)
    wait_for_previous(IS_DEPENDENT)
    q_offsets = row.to(tl.int64) * stride_q_row + (head * GROUP + group)[:, None] * stride_q_head
    q = tl.load(q_ptr + q_offsets + dims[None, :], mask=is_query, other=0.0)

    num_tiles = (kv_len + TILE - 1) // TILE
    num_parts = tl.minimum(num_tiles, SPLITS)
    if split >= num_parts:
        return

    k_head_ptr = k_ptr + head.to(tl.int64) * stride_k_head + dims[None, :]
    v_head_ptr = v_ptr + head.to(tl.int64) * stride_v_head + dims[None, :]
    largest = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    accumulated = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    if num_tiles <= SPLITS:
        in_block = (split * TILE) % BLOCK_SIZE + in_tile
        largest, total, accumulated = attend_tile(
            q,
            k_head_ptr + block * stride_k_block + (in_block * stride_k_token)[:, None],
            v_head_ptr + block * stride_v_block + (in_block * stride_v_token)[:, None],
            split * TILE + in_tile < kv_len,
            is_dim,
            scale_log2,
            largest,
            total,
            accumulated,
        )
    else:
        # Loads of several tiles under way count for more here than the first block's number.
        for tile in tl.range(split, num_tiles, SPLITS, num_stages=NUM_STAGES):
            block = tl.load(table_ptr + tile * TILE // BLOCK_SIZE).to(tl.int64)
            in_block = (tile * TILE) % BLOCK_SIZE + in_tile
            largest, total, accumulated = attend_tile(
                q,
                k_head_ptr + block * stride_k_block + (in_block * stride_k_token)[:, None],
                v_head_ptr + block * stride_v_block + (in_block * stride_v_token)[:, None],
                tile * TILE + in_tile < kv_len,
                is_dim,
                scale_log2,
                largest,
                total,
                accumulated,
            )

    if num_parts == 1:
        result = accumulated / total[:, None]
        out_offsets = (unit.to(tl.int64) * GROUP + group)[:, None] * HEAD_SIZE + dims[None, :]
        tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=is_query)
        return
    slot = (unit * SPLITS + split) * GROUP + group
    tl.store(accumulated_ptr + slot[:, None] * HEAD_SIZE + dims[None, :], accumulated, mask=is_query)
    tl.store(softmax_ptr + slot * 2, largest, mask=group < GROUP)
    tl.store(softmax_ptr + slot * 2 + 1, total, mask=group < GROUP)
    # All threads of the program have stored before the one that counts announces it.
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + unit, 1, sem="acq_rel") == num_parts - 1:
        tl.store(arrived_ptr + unit, 0)
        _add_up(
            out_ptr,
            accumulated_ptr,
            softmax_ptr,
            unit,
            num_parts,
            SPLITS,
            GROUP,
            COMBINE_PAD,
            HEAD_SIZE,
            HEAD_PAD,
        )


@triton.jit
def _add_up(
    out_ptr,
    accumulated_ptr,
    softmax_ptr,
    unit,
    num_parts,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    COMBINE_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """Add up the parts of one unit, and write the result.

    Part by part, each thread its own elements: nothing goes from one thread to another.
    """
    group = tl.arange(0, COMBINE_PAD)
    dims = tl.arange(0, HEAD_PAD)
    is_group = group < GROUP
    is_element = is_group[:, None] & (dims < HEAD_SIZE)[None, :]
    # A head of padding has finite numbers as well, lest their differences be NaN.
    largest = tl.where(is_group, -float("inf"), 0.0)
    for part in tl.static_range(SPLITS):
        # Past the first-level cache, which does not see what other multiprocessors write.
        own_largest = tl.load(
            softmax_ptr + ((unit * SPLITS + part) * GROUP + group) * 2,
            mask=is_group & (part < num_parts),
            other=-float("inf"),
            cache_modifier=".cg",
        )
        largest = tl.maximum(largest, own_largest)
    total = tl.where(is_group, 0.0, 1.0)
    accumulated = tl.zeros([COMBINE_PAD, HEAD_PAD], tl.float32)
    for part in tl.static_range(SPLITS):
        slot = (unit * SPLITS + part) * GROUP + group
        is_part = part < num_parts
        own_largest = tl.load(
            softmax_ptr + slot * 2, mask=is_group & is_part, other=-float("inf"), cache_modifier=".cg"
        )
        own_total = tl.load(
            softmax_ptr + slot * 2 + 1, mask=is_group & is_part, other=0.0, cache_modifier=".cg"
        )
        own = tl.load(
            accumulated_ptr + slot[:, None] * HEAD_SIZE + dims[None, :],
            mask=is_element & is_part,
            other=0.0,
            cache_modifier=".cg",
        )
        weight = tl.exp2(own_largest - largest)
        total += weight * own_total
        accumulated += weight[:, None] * own
    out_offsets = (unit.to(tl.int64) * GROUP + group)[:, None] * HEAD_SIZE + dims[None, :]
    tl.store(
        out_ptr + out_offsets, (accumulated / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_element
    )
