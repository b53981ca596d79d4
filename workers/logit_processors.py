"""What is done to logits before a token is chosen: masks, bias and penalties, in this order.

    padding, grammar          before anything is shown to a client
    allowed tokens, bad words, bias, end tokens held back by min_tokens
    repetition, frequency, presence penalty

Called by: sampler.py. Plain functions of tensors that change `logits` in place: [rows, width] float32, the columns
that `columns` says. A mask is -inf and survives all that follows, because biases are finite and repetition penalties
positive. No mask empties a row: one that would is left out for that row, so that there is always something to sample.
"""

import numpy as np
import torch

from .sampling_batch import Penalties, SamplingBatch, TokenMasks, TokenValues
from .vocab_columns import VocabColumns, any_of

BITS_OF_BYTES = (torch.arange(256).unsqueeze(-1) >> torch.arange(8)).bitwise_and(1).bool()
LARGEST = 1e30
"""Logits are kept within this: the rest of float32 is room for temperatures, and no infinity is a number."""


def mask_padding(logits: torch.Tensor, vocab_limits: torch.Tensor, min_limit: int, first_id: int) -> None:
    """Mask the ids that no tokenizer has. vocab_limits: [rows] int64; min_limit: the smallest of them."""
    start = min(max(0, min_limit - first_id), logits.shape[1])
    tail = logits[:, start:]
    ids = torch.arange(first_id + start, first_id + logits.shape[1], device=logits.device)
    tail.masked_fill_(ids >= vocab_limits.unsqueeze(-1), -torch.inf)


def mask_grammar(logits: torch.Tensor, grammar: TokenMasks, columns: VocabColumns) -> None:
    """Leave what the grammars allow."""
    _allow(logits, grammar, columns)


def process(logits: torch.Tensor, batch: SamplingBatch, columns: VocabColumns) -> None:
    """Apply all stages after the grammar."""
    if batch.allowed is not None:
        _allow(logits, batch.allowed, columns)
    if batch.bad_words is not None:
        _ban(logits, batch.bad_words, columns)
    if batch.bias is not None:
        add_bias(logits, batch.bias, columns.first_id)
    if batch.held_back is not None:
        _ban(logits, batch.held_back, columns)
    if batch.penalties is not None:
        penalise(logits, batch.penalties, columns.first_id)


def unpack_masks(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Bits to booleans. words: [m, num_words] int32, bit j of word i for token 32 * i + j; returns [m, vocab_size]."""
    return BITS_OF_BYTES.to(words.device)[words.view(torch.uint8).int()].flatten(1)[:, :vocab_size]


def pack_masks(
    allowed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Booleans to bits, what `unpack_masks` makes of them again. allowed: [..., size]; returns [..., num_words]."""
    bits = np.pad(allowed, [(0, 0)] * (allowed.ndim - 1) + [(0, -allowed.shape[-1] % 32)])
    return np.packbits(bits, axis=-1, bitorder="little").view("<i4")


def add_bias(logits: torch.Tensor, bias: TokenValues, first_id: int) -> None:
    """Add to single logits."""
    rows = logits.index_select(0, bias.row_index)
    logits.index_copy_(0, bias.row_index, _add(rows, bias, first_id))


def penalise(logits: torch.Tensor, penalties: Penalties, first_id: int) -> None:
    """Repetition (Keskar et al., 2019, by the sign of the logit), then frequency and presence (as OpenAI has them)."""
    end = first_id + logits.shape[1]
    counts = penalties.counts[:, first_id:end].index_select(0, penalties.slots)
    if counts.shape[1] < logits.shape[1]:
        # A rank without columns has one of an id that no token has.
        return
    held = unpack_masks(penalties.held.index_select(0, penalties.slots), end)[:, first_id:]
    old = logits.index_select(0, penalties.row_index)
    rows = torch.where(old > 0, old / penalties.repetition, old * penalties.repetition)
    rows = rows - penalties.frequency * counts - penalties.presence * (counts > 0)
    is_changed = held & (old > -torch.inf)
    logits.index_copy_(0, penalties.row_index, torch.where(is_changed, rows.clamp(-LARGEST, LARGEST), old))


def _allow(logits: torch.Tensor, masks: TokenMasks, columns: VocabColumns) -> None:
    old = logits.index_select(0, masks.row_index)
    allowed = unpack_masks(masks.words, columns.first_id + logits.shape[1])[:, columns.first_id :]
    if allowed.shape[1] < logits.shape[1]:
        allowed = torch.zeros_like(old, dtype=torch.bool)
    _put(logits, masks.row_index, old, old.masked_fill(~allowed, -torch.inf), columns)


def _ban(logits: torch.Tensor, values: TokenValues, columns: VocabColumns) -> None:
    old = logits.index_select(0, values.row_index)
    _put(logits, values.row_index, old, _add(old.clone(), values, columns.first_id), columns)


def _put(
    logits: torch.Tensor, row_index: torch.Tensor, old: torch.Tensor, new: torch.Tensor, columns: VocabColumns
) -> None:
    has_some = any_of(columns, (new > -torch.inf).any(dim=-1))
    logits.index_copy_(0, row_index, torch.where(has_some.unsqueeze(-1), new, old))


def _add(rows: torch.Tensor, values: TokenValues, first_id: int) -> torch.Tensor:
    """Add in place. Ids of other ranks get a zero: to leave them out would make the host wait for the device."""
    columns = values.token_ids - first_id
    is_here = (columns >= 0) & (columns < rows.shape[1])
    added = torch.where(is_here, values.values, 0.0)
    return rows.index_put_((values.place, columns.clamp(0, rows.shape[1] - 1)), added, accumulate=True)
