"""What a decode step computes on, in one Triton kernel, for CUDA.

Called by: decode_step.py, inside a CUDA graph. The reference is decode_inputs.py. One program a row: it copies no more
of the row's block tables than the row uses.
"""

import torch
import triton
import triton.language as tl

from .decode_inputs import DecodeInputs
from .dependent_launch import dependent_launch, let_next_come, wait_for_previous

_ENTRIES = 256


def make_decode_inputs(
    rows: torch.Tensor,
    positions: torch.Tensor,
    new_blocks: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
) -> DecodeInputs:
    """See decode_inputs.py. All tensors contiguous."""
    (num_rows,), (num_groups, all_rows, max_blocks) = rows.shape, block_tables.shape
    inputs = DecodeInputs(
        token_ids=torch.empty_like(rows),
        positions=torch.empty_like(rows),
        kv_lens=torch.empty(num_rows, dtype=torch.int32, device=rows.device),
        slot_mappings=torch.empty_like(new_blocks),
        block_tables=torch.empty((num_groups, num_rows, max_blocks), dtype=torch.int32, device=rows.device),
    )
    _kernel[(num_rows, num_groups)](
        rows,
        positions,
        new_blocks,
        last_tokens,
        block_tables,
        inputs.token_ids,
        inputs.positions,
        inputs.kv_lens,
        inputs.slot_mappings,
        inputs.block_tables,
        num_rows,
        all_rows,
        max_blocks,
        block_size,
        ENTRIES=_ENTRIES,
        num_warps=1,
        **dependent_launch(rows.device),
    )
    return inputs


@triton.jit(do_not_specialize=["num_rows", "all_rows", "max_blocks"])
def _kernel(
    rows_ptr,
    positions_ptr,
    new_blocks_ptr,
    last_tokens_ptr,
    tables_ptr,
    token_ids_out_ptr,
    positions_out_ptr,
    kv_lens_out_ptr,
    slots_out_ptr,
    tables_out_ptr,
    num_rows,
    all_rows,
    max_blocks,
    block_size,
    ENTRIES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    let_next_come(IS_DEPENDENT)
    at = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + at)
    position = tl.load(positions_ptr + at)
    new_block = tl.load(new_blocks_ptr + group * num_rows + at)
    place = tl.maximum(position, 0)
    entry = place // block_size
    if group == 0:
        tl.store(token_ids_out_ptr + at, tl.load(last_tokens_ptr + row))
        tl.store(positions_out_ptr + at, place)
        tl.store(kv_lens_out_ptr + at, (position + 1).to(tl.int32))
    table_ptr = tables_ptr + (group * all_rows + row) * max_blocks
    out_ptr = tables_out_ptr + (group * num_rows + at) * max_blocks
    block = tl.where(new_block >= 0, new_block, tl.load(table_ptr + entry).to(tl.int64))
    tl.store(
        slots_out_ptr + group * num_rows + at,
        tl.where(position >= 0, block * block_size + place % block_size, -1),
    )
    if new_block >= 0:
        tl.store(table_ptr + entry, new_block.to(tl.int32))
    num_entries = tl.where(position >= 0, entry + 1, 0)
    for first in range(0, num_entries, ENTRIES):
        entries = first + tl.arange(0, ENTRIES)
        is_used = entries < num_entries
        # What this program has just stored, other threads of it need not see yet.
        values = tl.load(table_ptr + entries, mask=is_used & (entries != entry), other=0)
        values = tl.where(entries == entry, block.to(tl.int32), values)
        tl.store(out_ptr + entries, values, mask=is_used)
