"""What a decode step computes on, from what the rows hold on the device. Plain torch, for every device.

Called by: decode_step.py. The reference of triton_decode_inputs.py.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """Rows of one token each.

    token_ids, positions: [n] int64; of padding anything
    kv_lens:              [n] int32; 0: padding
    slot_mappings:        [num_kv_groups, n] int64; -1: padding
    block_tables:         [num_kv_groups, n, max_blocks] int32; entries beyond a row's blocks hold anything
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_lens: torch.Tensor
    slot_mappings: torch.Tensor
    block_tables: torch.Tensor


def make_decode_inputs(
    rows: torch.Tensor,
    positions: torch.Tensor,
    new_blocks: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
) -> DecodeInputs:
    """Look up what each row computes, and put new blocks into its table.

    rows:         [n] int64, distinct but for padding
    positions:    [n] int64, of the row's next token; -1: padding
    new_blocks:   [num_kv_groups, n] int64, the block of that token where it is new to the table; -1: it is not
    last_tokens:  [all rows] int64
    block_tables: [num_kv_groups, all rows, max_blocks] int32, changed in place
    """
    num_groups = block_tables.shape[0]
    is_real = positions >= 0
    places = positions.clamp(min=0)
    entries = places // block_size
    tables = block_tables.index_select(1, rows)
    index = entries.expand(num_groups, -1).unsqueeze(-1)
    known = tables.gather(2, index).squeeze(-1)
    blocks = torch.where(new_blocks >= 0, new_blocks, known)
    tables.scatter_(2, index, blocks.int().unsqueeze(-1))
    for group in range(num_groups):
        block_tables[group].index_put_((rows, entries), blocks[group].int())
    slots = blocks * block_size + places % block_size
    return DecodeInputs(
        token_ids=last_tokens.index_select(0, rows),
        positions=places,
        kv_lens=(positions + 1).int(),
        slot_mappings=torch.where(is_real, slots, -1),
        block_tables=tables,
    )
