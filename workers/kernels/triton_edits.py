"""What a batch does to its logits before a token is chosen, made in Triton kernels, for CUDA.

Called by: workers/fused_sampling.py. The reference are the stages of workers/logit_processors.py, in their order and
with their roundings. No logit is written: the result is `RowEdits`, bits for each id and the few logits that are new,
and the kernels that choose the token see through them. The cost is that of the words of 32 ids, a 32nd of the row, and
of the ids that are changed: those that a request already holds, for penalties.

A mask that would leave a row without a token does not count for it. Of parts of rows each rank says whether it has one
left, and they ask each other (`any_of`). No call waits for the device.
"""

import torch
import triton
import triton.language as tl

from ..logit_processors import LARGEST
from ..sampling_batch import Penalties, SamplingBatch, TokenMasks, TokenValues
from ..vocab_columns import WHOLE, VocabColumns, any_of
from .triton_rows import LogitRows, RowEdits, row_limit

WORDS = 512
"""Words that one program of the penalties looks at."""
ENTRIES = 256
"""Single ids that one program marks."""

_LARGEST = tl.constexpr(LARGEST)


def no_edits(rows: LogitRows, *, has_changes: bool) -> RowEdits:
    """Edits that do nothing yet. has_changes: logits will be changed, not only masked."""
    num_rows, width = rows.shape
    num_words = triton.cdiv(width, 32)
    device = rows.logits.device
    return RowEdits(
        flags=torch.zeros(num_rows, dtype=torch.int32, device=device),
        allowed=torch.full((num_rows, num_words), -1, dtype=torch.int32, device=device),
        changed=torch.zeros((num_rows, num_words), dtype=torch.int32, device=device),
        replaced=torch.empty((num_rows if has_changes else 0, width), dtype=torch.float32, device=device),
        num_words=num_words,
        width=width,
    )


def masks_of(edits: RowEdits) -> RowEdits:
    """The same masks without changed logits, whatever is added to `edits` from now on."""
    return edits._replace(
        flags=edits.flags.clone(), allowed=edits.allowed.clone(), changed=torch.zeros_like(edits.changed)
    )


def allow(rows: LogitRows, edits: RowEdits, masks: TokenMasks, columns: VocabColumns) -> None:
    """Leave what the masks allow. See logit_processors._allow."""
    _mask(rows, edits, masks.row_index, masks.words, columns, first_word=rows.first_id // 32, is_ban=False)


def ban(rows: LogitRows, edits: RowEdits, values: TokenValues, columns: VocabColumns) -> None:
    """Forbid the tokens whose value is -inf. See logit_processors._ban."""
    shape = (values.row_index.shape[0], edits.num_words)
    words = torch.zeros(shape, dtype=torch.int32, device=edits.flags.device)
    count = values.token_ids.shape[0]
    if count:
        _mark_kernel[(triton.cdiv(count, ENTRIES),)](
            values.place, values.token_ids, values.values, words, count, rows.first_id, edits.width, edits.num_words,
            ENTRIES=ENTRIES, num_warps=4,
        )  # fmt: skip
    _mask(rows, edits, values.row_index, words, columns, first_word=0, is_ban=True)


def add_bias(rows: LogitRows, edits: RowEdits, bias: TokenValues) -> None:
    """Add to single logits, no token of a row twice. See logit_processors.add_bias."""
    count = bias.token_ids.shape[0]
    if count:
        _bias_kernel[(triton.cdiv(count, ENTRIES),)](
            rows.logits, bias.row_index, bias.place, bias.token_ids, bias.values, edits, rows.logits.stride(0), count,
            rows.first_id, ENTRIES=ENTRIES, num_warps=4,
        )  # fmt: skip


def penalise(rows: LogitRows, edits: RowEdits, penalties: Penalties) -> None:
    """Repetition, frequency and presence penalties. See logit_processors.penalise."""
    num_rows = penalties.row_index.shape[0]
    # A rank without columns has one of an id that no token has.
    width = min(edits.width, penalties.counts.shape[1] - rows.first_id)
    if num_rows == 0 or width <= 0:
        return
    _penalise_kernel[(num_rows, triton.cdiv(triton.cdiv(width, 32), WORDS))](
        rows.logits, penalties.row_index, penalties.slots, penalties.repetition, penalties.frequency,
        penalties.presence, penalties.held, penalties.counts, edits, rows.logits.stride(0), penalties.held.stride(0),
        penalties.counts.stride(0), penalties.repetition.stride(0), width, rows.first_id,
        WORDS=WORDS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def edit(
    rows: LogitRows, batch: SamplingBatch, columns: VocabColumns
) -> tuple[RowEdits | None, RowEdits | None]:
    """Apply all stages. Return the edits, and those of them that clients see in raw log-probabilities; None: none."""
    if not batch.changes_logits:
        return None, None
    edits = no_edits(rows, has_changes=batch.bias is not None or batch.penalties is not None)
    raw = None
    if batch.grammar is not None:
        allow(rows, edits, batch.grammar, columns)
        raw = masks_of(edits) if batch.logprobs else None
    if batch.allowed is not None:
        allow(rows, edits, batch.allowed, columns)
    if batch.bad_words is not None:
        ban(rows, edits, batch.bad_words, columns)
    if batch.bias is not None:
        add_bias(rows, edits, batch.bias)
    if batch.held_back is not None:
        ban(rows, edits, batch.held_back, columns)
    if batch.penalties is not None:
        penalise(rows, edits, batch.penalties)
    return edits, raw


def _mask(
    rows: LogitRows,
    edits: RowEdits,
    row_index: torch.Tensor,
    words: torch.Tensor,
    columns: VocabColumns,
    *,
    first_word: int,
    is_ban: bool,
) -> None:
    """words: [m, any] int32; first_word: of the first column"""
    num_rows = row_index.shape[0]
    if num_rows == 0:
        return
    found = torch.empty(num_rows, dtype=torch.bool, device=edits.flags.device)

    def launch(*, is_known: bool, applies: bool) -> None:
        limits, stride_limits, _ = rows.kernel_arguments()
        _mask_kernel[(num_rows,)](
            rows.logits, row_index, words, found, limits, stride_limits, edits, rows.logits.stride(0), words.stride(0),
            words.shape[1], first_word, rows.first_id,
            IS_BAN=is_ban, IS_KNOWN=is_known, APPLIES=applies, HAS_LIMITS=limits is not None,
            NUM_WORDS_PAD=triton.next_power_of_2(edits.num_words), num_warps=8,
        )  # fmt: skip

    launch(is_known=False, applies=columns is WHOLE)
    if columns is not WHOLE:
        found = any_of(columns, found)
        launch(is_known=True, applies=True)


@triton.jit
def _lowest_bit(words):
    """Place of the lowest bit that is set in each word, and the words without it. Of no word of 0."""
    lowest = words & -words
    # A power of two is exact in float32, and its exponent is the place.
    exponent = lowest.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return exponent - 127, words ^ lowest


@triton.jit(do_not_specialize=["count", "first_id"])
def _mark_kernel(
    place_ptr, token_ids_ptr, values_ptr, words_ptr, count, first_id, width, num_words, ENTRIES: tl.constexpr
):
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    place = tl.load(place_ptr + entry, mask=entry < count, other=0)
    column = tl.load(token_ids_ptr + entry, mask=entry < count, other=-1) - first_id
    value = tl.load(values_ptr + entry, mask=entry < count, other=0.0)
    bit = (tl.full((ENTRIES,), 1, tl.int32) << (column & 31).to(tl.int32)).to(tl.int32)
    is_marked = (entry < count) & (value == -float("inf")) & (column >= 0) & (column < width)
    tl.atomic_or(words_ptr + place * num_words + (column >> 5), bit, mask=is_marked)


@triton.jit(do_not_specialize=["count", "first_id"])
def _bias_kernel(
    logits_ptr, row_index_ptr, place_ptr, token_ids_ptr, values_ptr, edits, stride_logits, count, first_id,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    place = tl.load(place_ptr + entry, mask=entry < count, other=0)
    column = tl.load(token_ids_ptr + entry, mask=entry < count, other=-1) - first_id
    is_here = (entry < count) & (column >= 0) & (column < edits.width)
    row = tl.load(row_index_ptr + place, mask=is_here, other=0)
    x = tl.load(logits_ptr + row * stride_logits + column, mask=is_here, other=0.0).to(tl.float32)
    x = tl.minimum(x, _LARGEST) + tl.load(values_ptr + entry, mask=is_here, other=0.0)
    tl.store(edits.replaced + row * edits.width + column, x, mask=is_here)
    bit = (tl.full((ENTRIES,), 1, tl.int32) << (column & 31).to(tl.int32)).to(tl.int32)
    tl.atomic_or(edits.changed + row * edits.num_words + (column >> 5), bit, mask=is_here)
    tl.store(edits.flags + row, tl.full((ENTRIES,), 1, tl.int32), mask=is_here)


@triton.jit(do_not_specialize=["stride_limits", "stride_words", "num_given", "first_word", "first_id"])
def _mask_kernel(
    logits_ptr, row_index_ptr, words_ptr, found_ptr, limits_ptr, stride_limits, edits, stride_logits, stride_words,
    num_given, first_word, first_id,
    IS_BAN: tl.constexpr, IS_KNOWN: tl.constexpr, APPLIES: tl.constexpr, HAS_LIMITS: tl.constexpr,
    NUM_WORDS_PAD: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(row_index_ptr + place)
    at = tl.arange(0, NUM_WORDS_PAD)
    is_word = at < edits.num_words
    given = tl.load(
        words_ptr + place * stride_words + first_word + at,
        mask=is_word & (first_word + at < num_given),
        other=0,
    )
    allowed_ptr = edits.allowed + row * edits.num_words + at
    left = tl.load(allowed_ptr, mask=is_word, other=0)
    left = left & (~given if IS_BAN else given)
    if IS_KNOWN:
        has_token = tl.load(found_ptr + place).to(tl.int32)
    else:
        # Any token with a number will do: mostly the first look at each word finds one.
        limit = row_limit(limits_ptr, stride_limits, row, first_id, edits.width, HAS_LIMITS)
        has_token = tl.full((), 0, tl.int32)
        bits = left
        is_open = tl.max((bits != 0).to(tl.int32), 0)
        while is_open != 0:
            is_here = bits != 0
            lowest, bits = _lowest_bit(bits)
            column = at * 32 + lowest
            x = tl.load(
                logits_ptr + row * stride_logits + column,
                mask=is_here & (column < limit),
                other=-float("inf"),
            )
            has_token = tl.max((x.to(tl.float32) > -float("inf")).to(tl.int32), 0)
            is_open = tl.where(has_token != 0, 0, tl.max((bits != 0).to(tl.int32), 0))
        tl.store(found_ptr + place, has_token != 0)
    if APPLIES:
        if has_token != 0:
            tl.store(allowed_ptr, left, mask=is_word)
            tl.store(edits.flags + row, 1)


@triton.jit(do_not_specialize=["stride_values", "first_id"])
def _penalise_kernel(
    logits_ptr, row_index_ptr, slots_ptr, repetition_ptr, frequency_ptr, presence_ptr, held_ptr, counts_ptr, edits,
    stride_logits, stride_held, stride_counts, stride_values, width, first_id,
    WORDS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = tl.load(row_index_ptr + place)
    slot = tl.load(slots_ptr + place)
    repetition = tl.load(repetition_ptr + place * stride_values)
    frequency = tl.load(frequency_ptr + place * stride_values)
    presence = tl.load(presence_ptr + place * stride_values)
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    is_word = at * 32 < width
    held = tl.load(held_ptr + slot * stride_held + first_id // 32 + at, mask=is_word, other=0)
    changed_ptr = edits.changed + row * edits.num_words + at
    changed = tl.load(changed_ptr, mask=is_word, other=0)
    bits = held
    while tl.max((bits != 0).to(tl.int32), 0) != 0:
        is_here = bits != 0
        lowest, bits = _lowest_bit(bits)
        column = at * 32 + lowest
        is_here = is_here & (column < width)
        is_changed = is_here & (((changed >> lowest) & 1) != 0)
        value_ptr = edits.replaced + row * edits.width + column
        x = tl.load(logits_ptr + row * stride_logits + column, mask=is_here, other=0.0).to(tl.float32)
        old = tl.where(is_changed, tl.load(value_ptr, mask=is_changed, other=0.0), tl.minimum(x, _LARGEST))
        count = tl.load(counts_ptr + slot * stride_counts + first_id + column, mask=is_here, other=0)
        divided = tl.div_rn(old, tl.zeros_like(old) + repetition)
        new = tl.where(old > 0, divided, old * repetition)
        new = new - frequency * count.to(tl.float32) - presence * (count > 0).to(tl.float32)
        new = tl.minimum(tl.maximum(new, -_LARGEST), _LARGEST)
        tl.store(value_ptr, tl.where(old == -float("inf"), old, new), mask=is_here)
    tl.store(changed_ptr, changed | held, mask=is_word)
    tl.store(edits.flags + row, 1)
