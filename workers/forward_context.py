"""ForwardContext: what the attention layers must know of one step. Built once per step, passed as an argument.

Called by: step_tensors.py and the recorded steps build it; layers/attention.py and kernels/ read it. Runs in a worker
process.

A step holds rows (requests), each with `query_len` new tokens at the end of `kv_len` tokens in all. Rows of alike
lengths form a group, and one call computes the group, so no loop over requests is left in decode:

    kind     rows                                   query            mask
    decode   one new token, KV lengths within 2x    folded           which keys are real, only if lengths differ
    short    2 to 31 new tokens, same bucket        folded           causal
    long     one row of 32 tokens or more           group in batch   causal; none needed from position 0

Layers with a sliding window hold no key that none of their queries sees: a row of a million tokens costs such a
layer no more than its window. KV cache groups that see the same tokens of this step, be it because no row is
longer than the window, are laid out once: they differ in the slots only.

Keys are gathered by slot, not by block: a place that holds no token of the row reads slot 0, in the null block,
which is always zero. Stale values, a NaN among them, thus never reach a sum: 0 * NaN would be NaN.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from .kernels.row_attention import HeadIndex, make_head_index
from .paged_rows import PagedRows

LONG_QUERY = 32
"""From here on a row is computed alone: its matrix products are large enough, and nothing is padded."""
MAX_GATHERED_SLOTS = 1 << 17
"""Slots of one group at most. Bounds the copy of keys and values that a group's gather makes."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Rows of alike lengths, with R rows, Q new tokens and K visible keys each after padding.

    query_index:  [R * Q] int64, the tokens of the step to read; a padded place repeats the row's last token
    output_index: [num_real] int64, places of [R * Q] that are real; None when all are
    is_whole:     True: the group is the whole step, its tokens in their order
    slots:        [R * K] int64, where the keys are; 0 in a padded place
    slot_range:   first slot when R is 1 and the K slots lie side by side: then nothing is gathered
    mask:         [R, 1, Q, K] in the model's dtype, 0 or -inf, None when every query sees every key
    is_causal:    True: one row from position 0, no longer than the window, so plain causal attention needs no mask
    head_indices: made by the first layer of a step that asks, found by the others
    """

    num_rows: int
    query_len: int
    kv_len: int
    query_index: torch.Tensor
    output_index: torch.Tensor | None
    is_whole: bool
    slots: torch.Tensor
    slot_range: int | None
    mask: torch.Tensor | None
    is_causal: bool
    head_indices: dict[tuple[int, int], HeadIndex] = field(default_factory=dict, repr=False)

    def head_index(self, num_kv_heads: int, group_size: int) -> HeadIndex:
        """Where each head's keys and values are; for a group of rows with one new token each."""
        index = self.head_indices.get((num_kv_heads, group_size))
        if index is None:
            index = make_head_index(
                self.slots,
                self.mask,
                num_rows=self.num_rows,
                num_kv_heads=num_kv_heads,
                group_size=group_size,
            )
            self.head_indices[num_kv_heads, group_size] = index
        return index


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One step; everything for each KV cache group, in their order.

    windows:       tokens that a query sees at most, itself among them; None: all
    slot_mappings: [num_tokens] int64, the flat cache position of each new token
                   negative in padding, which is not stored; there is some in CUDA graphs only
    groups:        rows of alike lengths, covering every token of the step exactly once; empty when there are `rows`
    rows:          the same for attention kernels that read block tables
    """

    windows: Sequence[int | None]
    slot_mappings: Sequence[torch.Tensor]
    groups: Sequence[Sequence[AttentionGroup]] = ()
    rows: PagedRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of a step on the host, in the order of its tokens. Everything int64.

    query_lens:   [num_rows] new tokens of each row, positive
    kv_lens:      [num_rows] tokens of each row after this step
    block_tables: [num_kv_groups, num_rows, max_blocks]; entries beyond a row's blocks, or before its window, are not
                  read
    """

    query_lens: Ints
    kv_lens: Ints
    block_tables: Ints
    block_size: int


def slot_mapping(rows: StepRows) -> Ints:
    """The flat cache position of each new token in each KV cache group: [num_kv_groups, num_tokens]."""
    starts = np.cumsum(rows.query_lens) - rows.query_lens
    row_of_token = np.repeat(np.arange(len(rows.query_lens)), rows.query_lens)
    positions = (rows.kv_lens - rows.query_lens - starts)[row_of_token] + np.arange(len(row_of_token))
    return np.stack(
        [_slots_of(table, rows.block_size, row_of_token, positions) for table in rows.block_tables]
    )


def build_forward_context(
    rows: StepRows, *, windows: Sequence[int | None] = (None,), dtype: torch.dtype, device: torch.device
) -> ForwardContext:
    """Group the rows of a step and build index tensors and masks.

    windows: of the KV cache groups
    """
    starts = np.cumsum(rows.query_lens) - rows.query_lens
    slot_mappings = [torch.from_numpy(slots).to(device) for slots in slot_mapping(rows)]
    longest = int(rows.kv_lens.max(initial=0))
    # By the window that counts: one that is longer than every row hides nothing.
    tables_of_reach: dict[int, list[int]] = defaultdict(list)
    for number, window in enumerate(windows):
        tables_of_reach[longest if window is None else min(window, longest)].append(number)
    groups: list[list[AttentionGroup]] = [[] for _ in windows]
    for reach, numbers in tables_of_reach.items():
        # The first token of each row that any of its queries sees.
        first_keys = np.maximum(rows.kv_lens - rows.query_lens + 1 - reach, 0)
        for members in _partition_rows(rows, rows.kv_lens - first_keys):
            made = _build_groups(
                rows,
                rows.block_tables[numbers],
                members,
                starts[members],
                first_keys=first_keys[members],
                reach=reach,
                dtype=dtype,
                device=device,
            )
            for number, group in zip(numbers, made, strict=True):
                groups[number].append(group)
    return ForwardContext(windows=windows, slot_mappings=slot_mappings, groups=groups)


def _partition_rows(rows: StepRows, num_keys: Ints) -> list[Ints]:
    """Put rows of the same query bucket and bucket of visible keys (powers of two) together."""
    buckets: dict[tuple[int, int], list[int]] = defaultdict(list)
    alone: list[Ints] = []
    for row, (query_len, keys) in enumerate(zip(rows.query_lens.tolist(), num_keys.tolist(), strict=True)):
        if query_len >= LONG_QUERY:
            alone.append(np.array([row]))
        else:
            num_blocks = -(-keys // rows.block_size)
            buckets[(query_len - 1).bit_length(), (num_blocks - 1).bit_length()].append(row)
    groups = alone
    for members in buckets.values():
        index = np.array(members)
        rows_at_once = max(1, MAX_GATHERED_SLOTS // int(num_keys[index].max()))
        groups.extend(index[first : first + rows_at_once] for first in range(0, len(index), rows_at_once))
    return groups


def _build_groups(
    rows: StepRows,
    tables: Ints,
    members: Ints,
    starts: Ints,
    *,
    first_keys: Ints,
    reach: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[AttentionGroup]:
    """Lay `members` out once, and find their slots in each of `tables`.

    starts: of the rows' tokens in the step; first_keys: positions in the rows; reach: tokens a query sees
    """
    query_lens, kv_lens = rows.query_lens[members], rows.kv_lens[members]
    num_keys = kv_lens - first_keys
    num_rows, query_len, kv_len = len(members), int(query_lens.max()), int(num_keys.max())

    # [R, Q]: a padded place repeats the row's last token, so that its softmax has something to see.
    query_offsets = np.minimum(np.arange(query_len), query_lens[:, None] - 1)
    is_real_query = np.arange(query_len) < query_lens[:, None]
    # [R, K]
    key_offsets = np.arange(kv_len)
    is_real_key = key_offsets < num_keys[:, None]
    key_positions = np.where(is_real_key, first_keys[:, None] + key_offsets, 0)

    is_causal = num_rows == 1 and query_len > 1 and query_len == int(kv_lens[0]) <= reach
    mask: torch.Tensor | None = None
    if not is_causal and (query_len > 1 or not is_real_key.all()):
        # [R, Q, K]: a query at position p sees keys p - reach + 1 to p. That leaves out padded keys as well.
        last_seen = torch.from_numpy((num_keys - query_lens)[:, None] + query_offsets).to(device)[:, :, None]
        keys = torch.arange(kv_len, device=device)
        hidden = (keys > last_seen) | (keys <= last_seen - reach)
        mask = (
            torch.zeros(hidden.shape, dtype=dtype, device=device)
            .masked_fill_(hidden, -torch.inf)
            .unsqueeze(1)
        )
    tokens = (starts[:, None] + query_offsets).reshape(-1)
    is_whole = np.array_equal(tokens, np.arange(rows.query_lens.sum()))
    query_index = torch.from_numpy(tokens).to(device)
    output_index = None
    if not is_real_query.all():
        output_index = torch.from_numpy(np.flatnonzero(is_real_query)).to(device)
    groups = []
    for table in tables:
        slots = np.where(is_real_key, _slots_of(table, rows.block_size, members[:, None], key_positions), 0)
        is_range = num_rows == 1 and bool((np.diff(slots[0]) == 1).all())
        groups.append(
            AttentionGroup(
                num_rows=num_rows,
                query_len=query_len,
                kv_len=kv_len,
                query_index=query_index,
                output_index=output_index,
                is_whole=is_whole,
                slots=torch.from_numpy(slots.reshape(-1)).to(device),
                slot_range=int(slots[0, 0]) if is_range else None,
                mask=mask,
                is_causal=is_causal,
            )
        )
    return groups


def _slots_of(table: Ints, block_size: int, row_index: Ints, positions: Ints) -> Ints:
    """Flat cache positions of tokens, given their rows in a block table and their positions in them."""
    return table[row_index, positions // block_size] * block_size + positions % block_size
