"""What log-probabilities are made of, in Triton kernels, for CUDA: one read of the logits, and no sort.

Called by: workers/fused_sampling.py. The reference is `find_parts` of workers/logprobs.py.

The first kernel reads a row in pieces, many programs a row, and notes down of each piece the largest logit, the mass
relative to it and how many logits exceed the row's own token, and of each GROUP ids the largest logit. The second, one
program a row, adds the pieces up in their order and picks the likeliest tokens one after the other: each is the best
of the group that is best now, which alone is read again. Among equals the lowest id comes first.

A row's numbers do not depend on the other rows: pieces are the same for any number of programs. No call waits for the
device.
"""

import torch
import triton
import triton.language as tl

from ..logit_processors import LARGEST
from ..logprobs import RowParts
from .triton_draw import GROUP, PIECE, pieces_per_program
from .triton_rows import NO_KEY, LogitRows, load_logits, row_flag, row_limit, temper, to_key, to_value

MAX_PICKED = 512
"""Tokens up to which picking one after the other is faster than what torch has."""

_LARGEST = tl.constexpr(LARGEST)
_NO_KEY = tl.constexpr(NO_KEY)


def find_own(
    rows: LogitRows,
    row_index: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    temperatures: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Look up one token of each row: [m] float32, -inf where another rank has it. token_ids: [m] int64."""
    own = torch.empty(row_index.shape[0], dtype=torch.float32, device=token_ids.device)
    if own.shape[0]:
        _own_kernel[(own.shape[0],)](
            rows.logits, row_index, *rows.kernel_arguments(), *_filters(rows, temperatures, kept), token_ids, own,
            rows.logits.stride(0), rows.shape[1], rows.first_id, **_settings(rows, temperatures, kept), num_warps=1,
        )  # fmt: skip
    return own


def find_parts(
    rows: LogitRows,
    row_index: torch.Tensor,
    own: torch.Tensor,
    num_top: int,
    *,
    temperatures: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> RowParts:
    """See logprobs.find_parts.

    row_index:    [m] int64, which of the rows; own: [m] float32, the value to rank
    temperatures: [rows] float32; with it the values are tempered, of rows at 0 they stay
    kept:         [rows] float32, with temperatures: smaller values count as -inf
    """
    num_rows, (_, width) = row_index.shape[0], rows.shape
    device = own.device
    num_top = min(num_top, width)
    num_pieces, num_groups = triton.cdiv(width, PIECE), triton.cdiv(width, GROUP)
    group_best = torch.empty((num_rows, num_groups), dtype=torch.float32, device=device)
    largest = torch.empty((num_rows, num_pieces), dtype=torch.float32, device=device)
    mass = torch.empty_like(largest)
    num_larger = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=device)
    found = RowParts(
        largest=torch.empty(num_rows, dtype=torch.float32, device=device),
        mass=torch.empty(num_rows, dtype=torch.float64, device=device),
        num_larger=torch.empty(num_rows, dtype=torch.int64, device=device),
        values=torch.empty((num_rows, num_top), dtype=torch.float32, device=device),
        token_ids=torch.empty((num_rows, num_top), dtype=torch.int64, device=device),
    )
    if num_rows == 0:
        return found
    seen = (rows.logits, row_index, *rows.kernel_arguments(), *_filters(rows, temperatures, kept))
    settings = _settings(rows, temperatures, kept)
    step = pieces_per_program(num_rows, num_pieces)
    _piece_kernel[(num_rows, triton.cdiv(num_pieces, step))](
        *seen, own, group_best, largest, mass, num_larger, rows.logits.stride(0), width, rows.first_id, num_pieces,
        num_groups, step, **settings, PIECE=PIECE, GROUP=GROUP, num_warps=4,
    )  # fmt: skip
    _row_kernel[(num_rows,)](
        *seen, group_best, largest, mass, num_larger, found.largest, found.mass, found.num_larger, found.values,
        found.token_ids, rows.logits.stride(0), width, rows.first_id, num_pieces, num_groups, num_top, **settings,
        GROUP=GROUP, NUM_PIECES_PAD=triton.next_power_of_2(num_pieces),
        NUM_GROUPS_PAD=triton.next_power_of_2(num_groups), num_warps=4,
    )  # fmt: skip
    return found


def _filters(
    rows: LogitRows, temperatures: torch.Tensor | None, kept: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    # What a kernel does not read may be any pointer.
    any_pointer = rows.logits
    if temperatures is None:
        return any_pointer, any_pointer, 0
    return temperatures, any_pointer if kept is None else kept, temperatures.stride(0)


def _settings(
    rows: LogitRows, temperatures: torch.Tensor | None, kept: torch.Tensor | None
) -> dict[str, bool]:
    return {
        "IS_TEMPERED": temperatures is not None,
        "HAS_KEPT": temperatures is not None and kept is not None,
        "HAS_LIMITS": rows.limits is not None,
        "HAS_EDITS": rows.edits is not None,
    }


@triton.jit
def _filters_of(
    temperatures_ptr, kept_ptr, stride_temperatures, row, IS_TEMPERED: tl.constexpr, HAS_KEPT: tl.constexpr
):
    divisor = 1.0
    kept = -float("inf")
    if IS_TEMPERED:
        temperature = tl.load(temperatures_ptr + row * stride_temperatures)
        divisor = tl.where(temperature == 0.0, 1.0, temperature)
    if HAS_KEPT:
        kept = tl.load(kept_ptr + row)
    return divisor, kept


@triton.jit
def _shown(x, divisor, kept, IS_TEMPERED: tl.constexpr):
    """What is shown of logits."""
    if IS_TEMPERED:
        x = temper(x, divisor)
        x = tl.where(x >= kept, x, -float("inf"))
    else:
        x = tl.minimum(x, _LARGEST)
    return x


@triton.jit(do_not_specialize=["stride_limits", "stride_temperatures", "first_id"])
def _own_kernel(
    logits_ptr, row_index_ptr, limits_ptr, stride_limits, edits, temperatures_ptr, kept_ptr, stride_temperatures,
    token_ids_ptr, own_ptr, stride_logits, width, first_id,
    IS_TEMPERED: tl.constexpr, HAS_KEPT: tl.constexpr, HAS_LIMITS: tl.constexpr, HAS_EDITS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(row_index_ptr + place)
    limit = row_limit(limits_ptr, stride_limits, row, first_id, width, HAS_LIMITS)
    flag = row_flag(edits, row, HAS_EDITS)
    divisor, kept = _filters_of(temperatures_ptr, kept_ptr, stride_temperatures, row, IS_TEMPERED, HAS_KEPT)
    at = tl.load(token_ids_ptr + place) - first_id + tl.arange(0, 1)
    is_here = (at >= 0) & (at < width)
    x = load_logits(
        logits_ptr + row * stride_logits, at, is_here, limit, row, flag, edits, HAS_EDITS=HAS_EDITS
    )
    tl.store(own_ptr + place + tl.arange(0, 1), _shown(x, divisor, kept, IS_TEMPERED))


@triton.jit(
    do_not_specialize=["stride_limits", "stride_temperatures", "first_id", "num_pieces", "num_groups", "step"]
)
def _piece_kernel(
    logits_ptr, row_index_ptr, limits_ptr, stride_limits, edits, temperatures_ptr, kept_ptr, stride_temperatures,
    own_ptr, group_best_ptr, largest_ptr, mass_ptr, num_larger_ptr, stride_logits, width, first_id, num_pieces,
    num_groups, step,
    IS_TEMPERED: tl.constexpr, HAS_KEPT: tl.constexpr, HAS_LIMITS: tl.constexpr, HAS_EDITS: tl.constexpr,
    PIECE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * step
    row = tl.load(row_index_ptr + place)
    logits_ptr += row * stride_logits
    limit = row_limit(limits_ptr, stride_limits, row, first_id, width, HAS_LIMITS)
    flag = row_flag(edits, row, HAS_EDITS)
    divisor, kept = _filters_of(temperatures_ptr, kept_ptr, stride_temperatures, row, IS_TEMPERED, HAS_KEPT)
    own = tl.load(own_ptr + place)
    column = tl.arange(0, PIECE)
    in_piece = tl.arange(0, PIECE // GROUP)
    for piece in range(first, tl.minimum(first + step, num_pieces)):
        at = piece * PIECE + column
        x = load_logits(logits_ptr, at, at < width, limit, row, flag, edits, HAS_EDITS=HAS_EDITS)
        x = _shown(x, divisor, kept, IS_TEMPERED)
        x = tl.reshape(x, (PIECE // GROUP, GROUP))
        best = tl.max(x, 1)
        group = piece * (PIECE // GROUP) + in_piece
        tl.store(group_best_ptr + place * num_groups + group, best, mask=group < num_groups)
        largest = tl.max(best, 0)
        # A piece may hold nothing but -inf, and the difference of two of them is no number.
        mass = tl.sum(tl.sum(tl.exp(x - tl.maximum(largest, -_LARGEST)), 1), 0)
        tl.store(largest_ptr + place * num_pieces + piece, largest)
        tl.store(mass_ptr + place * num_pieces + piece, mass)
        tl.store(num_larger_ptr + place * num_pieces + piece, tl.sum(tl.sum((x > own).to(tl.int32), 1), 0))


@triton.jit(
    do_not_specialize=[
        "stride_limits",
        "stride_temperatures",
        "first_id",
        "num_pieces",
        "num_groups",
        "num_top",
    ]
)
def _row_kernel(
    logits_ptr, row_index_ptr, limits_ptr, stride_limits, edits, temperatures_ptr, kept_ptr, stride_temperatures,
    group_best_ptr, part_largest_ptr, part_mass_ptr, part_larger_ptr, largest_ptr, mass_ptr, num_larger_ptr,
    values_ptr, token_ids_ptr, stride_logits, width, first_id, num_pieces, num_groups, num_top,
    IS_TEMPERED: tl.constexpr, HAS_KEPT: tl.constexpr, HAS_LIMITS: tl.constexpr, HAS_EDITS: tl.constexpr,
    GROUP: tl.constexpr, NUM_PIECES_PAD: tl.constexpr, NUM_GROUPS_PAD: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(row_index_ptr + place)
    logits_ptr += row * stride_logits
    limit = row_limit(limits_ptr, stride_limits, row, first_id, width, HAS_LIMITS)
    flag = row_flag(edits, row, HAS_EDITS)
    divisor, kept = _filters_of(temperatures_ptr, kept_ptr, stride_temperatures, row, IS_TEMPERED, HAS_KEPT)
    piece = tl.arange(0, NUM_PIECES_PAD)
    is_piece = piece < num_pieces
    part = place * num_pieces + piece
    largest = tl.load(part_largest_ptr + part, mask=is_piece, other=-float("inf"))
    best = tl.max(largest, 0)
    scale = tl.exp(largest.to(tl.float64) - tl.maximum(best, -_LARGEST).to(tl.float64))
    mass = tl.load(part_mass_ptr + part, mask=is_piece, other=0.0).to(tl.float64)
    tl.store(largest_ptr + place, best)
    tl.store(mass_ptr + place, tl.sum(mass * scale, 0))
    num_larger = tl.load(part_larger_ptr + part, mask=is_piece, other=0)
    tl.store(num_larger_ptr + place, tl.sum(num_larger, 0).to(tl.int64))

    group = tl.arange(0, NUM_GROUPS_PAD)
    group_best = tl.load(group_best_ptr + place * num_groups + group, mask=group < num_groups, other=0.0)
    keys = tl.where(group < num_groups, to_key(group_best), _NO_KEY)
    last_key = tl.full((), _NO_KEY, tl.int32)
    last = tl.full((), -1, tl.int32)
    for i in range(num_top):
        # Of the best groups the first, in one comparison.
        key_and_group = tl.max((keys.to(tl.int64) << 32) | (NUM_GROUPS_PAD - 1 - group), 0)
        key = (key_and_group >> 32).to(tl.int32)
        best_group = NUM_GROUPS_PAD - 1 - (key_and_group & 0xFFFFFFFF).to(tl.int32)
        at = best_group * GROUP + tl.arange(0, GROUP)
        x = load_logits(logits_ptr, at, at < width, limit, row, flag, edits, HAS_EDITS=HAS_EDITS)
        own_keys = tl.where(at < width, to_key(_shown(x, divisor, kept, IS_TEMPERED)), _NO_KEY)
        # Of equal tokens those taken before have lower ids, in whatever group.
        is_next = (own_keys == key) & ((key != last_key) | (at > last))
        last = tl.min(tl.where(is_next, at, 0x7FFFFFFF), 0)
        last_key = key
        is_left = (own_keys < key) | ((own_keys == key) & (at > last))
        keys = tl.where(group == best_group, tl.max(tl.where(is_left, own_keys, _NO_KEY), 0), keys)
        tl.store(values_ptr + place * num_top + i, to_value(key))
        tl.store(token_ids_ptr + place * num_top + i, first_id + last.to(tl.int64))
