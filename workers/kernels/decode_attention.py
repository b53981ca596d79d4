"""Attention of one new token a row over a paged KV cache: one Triton kernel, for CUDA.

Called by: the "triton" attention backend, once per layer and step, on the worker's main thread. Waits for nothing on
the host, and its grid depends on no length, so it may stand in a CUDA graph.

A row's visible tokens of one KV head are a *unit*, cut into tiles of `TILE` tokens. The tiles of all units, in order
of row, head and position, are dealt out evenly: each of the `num_programs` programs takes one run of them, whatever
unit they belong to. A unit that lies in one program is written at once. One that is spread over several leaves a
partial result for each, and the program that finishes last adds them up, in the order of the programs: the result
depends on the lengths in the batch, never on who was last. Formula: online softmax, Milakov and Gimelshein 2018.

Query heads that share a KV head are the rows of one matrix product, so keys and values are read once.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, wait_for_previous

LOG2_E = 1.4426950408889634
NO_WINDOW = 1 << 30
FEW_ROWS = 16
"""Batches up to this have a kernel of their own, which looks at fewer lengths before it begins."""
COMBINED_ELEMENTS = 16384
"""Of partial results, added up at once: what 128 threads hold in 128 registers each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTuning:
    """How the kernel is laid out on the card. Changes rounding and speed, nothing else.

    tile:         tokens of one step of a program
    num_stages:   of the loads, block numbers first: 5 keep two tiles of keys and values under way
    num_programs: of the grid, two for each multiprocessor of the card; half of them where units are few
    """

    tile: int = 64
    num_warps: int = 4
    num_stages: int = 5
    num_programs: int = 264

    @classmethod
    def for_heads(cls, head_size: int, dtype: torch.dtype, *, num_programs: int) -> Self:
        """Return the layout for heads of this size, so that two programs' tiles fit into shared memory."""
        bytes_per_token = 2 * head_size * dtype.itemsize
        tile = 64 if bytes_per_token <= 512 else 32 if bytes_per_token <= 1024 else 16
        return cls(tile=tile, num_programs=num_programs)

    def programs_for(self, num_units: int) -> int:
        """Return the size of the grid for so many pairs of row and KV head."""
        # Twice the programs cut few units into twice the parts, whose sum takes longer than the reading.
        half = max(1, self.num_programs // 2)
        return half if num_units < half else self.num_programs


class DecodeScratch:
    """Partial results of one kernel launch; the launches of one stream may share it.

    max_rows: of a step; num_heads, num_kv_heads: of this rank
    """

    def __init__(
        self,
        *,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        tuning: DecodeTuning,
        device: torch.device,
    ) -> None:
        # The first and the last unit of each program may be a part only.
        slots = (2 * tuning.num_programs, num_heads // num_kv_heads)
        self.tuning = tuning
        self.max_rows = max_rows
        self.accumulated = torch.empty((*slots, head_size), dtype=torch.float32, device=device)
        # Largest score, and sum of the exponentials.
        self.softmax = torch.empty((*slots, 2), dtype=torch.float32, device=device)
        # Parts that have arrived. The kernel leaves it as it finds it: zero.
        self.arrived = torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    scratch: DecodeScratch,
    *,
    scale: float,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each row's last token to the tokens of the row that it sees, itself among them.

    q:                [num_rows, num_heads, head_size]; heads that share a KV head lie side by side
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_size], of any strides but the last, which is 1
    block_tables:     [num_rows, max_blocks] int32, rows of any stride; entries without visible tokens are not read
    kv_lens:          [num_rows] int32; 0: the row is padding, and its output is left as it is. Written before
                      the kernel that was launched last: they are read while that one ends
    window:           tokens that a query sees at most, itself among them; None: all
    returns           like q, contiguous; `out` when it is given
    """
    num_rows, num_heads, head_size = q.shape
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    assert num_rows <= scratch.max_rows
    group = num_heads // num_kv_heads
    tuning = scratch.tuning
    group_pad = max(16, triton.next_power_of_2(group))
    head_pad = triton.next_power_of_2(head_size)
    combine_pad = triton.next_power_of_2(group)
    # Two kernels for all sizes of batches: each takes a second to compile.
    rows_pad = FEW_ROWS if num_rows <= FEW_ROWS else triton.next_power_of_2(scratch.max_rows)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    _decode_kernel[(tuning.programs_for(num_rows * num_kv_heads),)](
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
        NO_WINDOW if window is None else window,
        num_rows,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        block_tables.stride(0),
        ROWS_PAD=rows_pad,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=group_pad,
        HEAD_SIZE=head_size,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size,
        TILE=tuning.tile,
        COMBINE_PAD=combine_pad,
        PARTS=max(1, COMBINED_ELEMENTS // (combine_pad * head_pad)),
        NUM_STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
        **dependent_launch(q.device),
    )
    return out


@triton.jit(do_not_specialize=["window", "num_rows", "stride_table"])
def _decode_kernel(
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
    window,
    num_rows,
    stride_q_row,
    stride_q_head,
    stride_k_block,
    stride_k_token,
    stride_k_head,
    stride_v_block,
    stride_v_token,
    stride_v_head,
    stride_table,
    ROWS_PAD: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COMBINE_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)

    # Where each row's tiles begin, in tiles of one head. Lengths come past the first-level cache, which may be older.
    rows = tl.arange(0, ROWS_PAD)
    lens = tl.load(kv_lens_ptr + rows, mask=rows < num_rows, other=0, cache_modifier=".cg")
    tiles = (lens + TILE - 1) // TILE - tl.maximum(lens - window, 0) // TILE
    ends = tl.cumsum(tiles, 0)
    per_program = (tl.sum(tiles, 0) * NUM_KV_HEADS + num_programs - 1) // num_programs
    position = program * per_program
    last = tl.minimum(position + per_program, tl.sum(tiles, 0) * NUM_KV_HEADS)
    is_before = ends * NUM_KV_HEADS <= position
    row = tl.sum(is_before.to(tl.int32), 0)
    row_start = tl.sum(tl.where(is_before, tiles, 0), 0) * NUM_KV_HEADS

    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, HEAD_PAD)
    in_tile = tl.arange(0, TILE)
    is_dim = dims < HEAD_SIZE
    is_query = (group < GROUP)[:, None] & is_dim[None, :]
    wait_for_previous(IS_DEPENDENT)

    while position < last:
        kv_len = tl.load(kv_lens_ptr + row)
        while kv_len == 0:
            row += 1
            kv_len = tl.load(kv_lens_ptr + row)
        first_key = tl.maximum(kv_len - window, 0)
        first_tile = first_key // TILE
        num_tiles = (kv_len + TILE - 1) // TILE - first_tile
        head = (position - row_start) // num_tiles
        unit_start = row_start + head * num_tiles
        unit_end = unit_start + num_tiles
        stop = tl.minimum(unit_end, last)

        q_offsets = row.to(tl.int64) * stride_q_row + (head * GROUP + group)[:, None] * stride_q_head
        q = tl.load(q_ptr + q_offsets + dims[None, :], mask=is_query, other=0.0)
        k_head_ptr = k_ptr + head.to(tl.int64) * stride_k_head
        v_head_ptr = v_ptr + head.to(tl.int64) * stride_v_head
        table_ptr = tables_ptr + row.to(tl.int64) * stride_table

        largest = tl.full([GROUP_PAD], -float("inf"), tl.float32)
        total = tl.zeros([GROUP_PAD], tl.float32)
        accumulated = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
        begin_tile = first_tile + position - unit_start
        for tile in tl.range(begin_tile, first_tile + stop - unit_start, num_stages=NUM_STAGES):
            keys = tile * TILE + in_tile
            is_key = (keys >= first_key) & (keys < kv_len)
            if BLOCK_SIZE % TILE == 0:
                block = tl.load(table_ptr + tile * TILE // BLOCK_SIZE).to(tl.int64)
                in_block = (tile * TILE) % BLOCK_SIZE + in_tile
            else:
                block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
                in_block = keys % BLOCK_SIZE
            k_offsets = block * stride_k_block + in_block * stride_k_token
            v_offsets = block * stride_v_block + in_block * stride_v_token
            largest, total, accumulated = attend_tile(
                q,
                k_head_ptr + k_offsets[:, None] + dims[None, :],
                v_head_ptr + v_offsets[:, None] + dims[None, :],
                is_key,
                is_dim,
                scale_log2,
                largest,
                total,
                accumulated,
            )

        first_part = unit_start // per_program
        num_parts = (unit_end - 1) // per_program - first_part + 1
        if num_parts == 1:
            result = accumulated / total[:, None]
            out_offsets = (row.to(tl.int64) * NUM_KV_HEADS + head) * GROUP + group
            tl.store(
                out_ptr + out_offsets[:, None] * HEAD_SIZE + dims[None, :],
                result.to(out_ptr.dtype.element_ty),
                mask=is_query,
            )
        else:
            slot = _slot(program, first_part) * GROUP + group
            tl.store(accumulated_ptr + slot[:, None] * HEAD_SIZE + dims[None, :], accumulated, mask=is_query)
            tl.store(softmax_ptr + slot * 2, largest, mask=group < GROUP)
            tl.store(softmax_ptr + slot * 2 + 1, total, mask=group < GROUP)
            # All threads of the program have stored before the one that counts announces it.
            tl.debug_barrier()
            counter_ptr = arrived_ptr + row * NUM_KV_HEADS + head
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_parts - 1:
                tl.store(counter_ptr, 0)
                _combine(
                    out_ptr,
                    accumulated_ptr,
                    softmax_ptr,
                    (row.to(tl.int64) * NUM_KV_HEADS + head) * GROUP,
                    first_part,
                    num_parts,
                    GROUP,
                    HEAD_SIZE,
                    HEAD_PAD,
                    COMBINE_PAD,
                    PARTS,
                )
        if (stop == unit_end) & (head == NUM_KV_HEADS - 1):
            row += 1
            row_start = unit_end
        position = stop


@triton.jit
def attend_tile(q, k_ptrs, v_ptrs, is_key, is_dim, scale_log2, largest, total, accumulated):
    """Read one tile of keys and values, and return the online softmax with it. is_key: of the tile, seen by the row.

    largest, total: of each query head, as far as it has come; accumulated: of its values
    """
    # A masked value is loaded as zero: times a probability of zero, what else lies there might be NaN.
    mask = is_key[:, None] & is_dim[None, :]
    k = tl.load(k_ptrs, mask=mask, other=0.0)
    v = tl.load(v_ptrs, mask=mask, other=0.0)
    scores = tl.dot(q, k.T, input_precision="ieee") * scale_log2
    scores = tl.where(is_key[None, :], scores, -float("inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    total = total * shrink + tl.sum(weights, 1)
    accumulated = accumulated * shrink[:, None]
    accumulated = tl.dot(weights.to(v.dtype), v, accumulated, input_precision="ieee")
    return new_largest, total, accumulated


@triton.jit
def _slot(program, first_part):
    """Where a program's partial result of a unit stands: the unit began in it, or before it."""
    return program * 2 + (program == first_part).to(tl.int32)


@triton.jit
def _combine(
    out_ptr,
    accumulated_ptr,
    softmax_ptr,
    out_head,
    first_part,
    num_parts,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    COMBINE_PAD: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add up the parts of one unit, PARTS at a time, and write the result."""
    group = tl.arange(0, COMBINE_PAD)
    dims = tl.arange(0, HEAD_PAD)
    parts = tl.arange(0, PARTS)
    is_group = group < GROUP
    is_element = is_group[:, None] & (dims < HEAD_SIZE)[None, :]
    # A head of padding has finite numbers as well, lest their differences be NaN.
    largest = tl.where(is_group, -float("inf"), 0.0)
    total = tl.where(is_group, 0.0, 1.0)
    accumulated = tl.zeros([COMBINE_PAD, HEAD_PAD], tl.float32)
    for begin in range(0, num_parts, PARTS):
        part = begin + parts
        is_part = part < num_parts
        # [PARTS, COMBINE_PAD]
        slots = _slot(first_part + part, first_part)[:, None] * GROUP + group[None, :]
        is_slot = is_part[:, None] & is_group[None, :]
        # Past the first-level cache, which does not see what other multiprocessors write.
        own_largest = tl.load(
            softmax_ptr + slots * 2, mask=is_slot, other=-float("inf"), cache_modifier=".cg"
        )
        own_total = tl.load(softmax_ptr + slots * 2 + 1, mask=is_slot, other=0.0, cache_modifier=".cg")
        own = tl.load(
            accumulated_ptr + slots[:, :, None] * HEAD_SIZE + dims[None, None, :],
            mask=is_part[:, None, None] & is_element[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_largest = tl.maximum(largest, tl.max(own_largest, 0))
        shrink = tl.exp2(largest - new_largest)
        weights = tl.exp2(own_largest - new_largest[None, :])
        total = total * shrink + tl.sum(weights * own_total, 0)
        accumulated = accumulated * shrink[:, None] + tl.sum(weights[:, :, None] * own, 0)
        largest = new_largest
    result = accumulated / total[:, None]
    out_offsets = (out_head + group)[:, None] * HEAD_SIZE + dims[None, :]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=is_element)
