"""The edge of a nucleus that takes a large part of the row, in Triton kernels, for CUDA: found without a sort.

Called by: triton_filters.py, for the rows whose edge lies below the groups that it has looked at. Of each such row it
is known between which two keys the edge lies, what mass lies above them, and what mass is wanted (`make_states`). Each
pass reads the row with many programs and counts into bins between the two keys; the program that is last of its row
decides in which bins the edge is:

1. Tokens are counted in bins of a few hundredths. What a bin weighs is then known within its width, and so is the
   edge within a few bins.
2. What lies above those is added up, and what lies inside is added up by bins of its own.
3. The same again inside the one bin that is left. Now it mostly has a single key, which is the edge; if not, once more.

Masses are added up as integers: in any order their sum is the same. No call waits for the device; a pass over rows
that are done costs its launch.
"""

import math

import torch
import triton
import triton.language as tl

from ..logit_processors import LARGEST
from .triton_draw import PIECE, pieces_per_program
from .triton_rows import NO_KEY, LogitRows, load_logits, row_flag, row_limit, temper, to_key, to_value

CLOSED, OPEN, OPEN_NUCLEUS = 0, 1, 2
"""States of a row: done; to be bisected as a whole; between two keys, for the passes here."""
LOW, HIGH, ABOVE, WANTED, BEST, SUMMED = range(6)
"""Columns of the states: the edge is a key in (LOW, HIGH]; masses above SUMMED, and what is wanted; bits of a float."""
NUM_COLUMNS = 8
FIXED = float(1 << 43)
"""A mass of 1, the likeliest token's, as an integer: the sum of 2^19 of them is one too."""

NUM_PASSES = 4
NUM_COUNTED = 256
"""Bins of the first pass: FINE of them for the first FINE_REACH below the upper key, the others for the rest."""
FINE, FINE_REACH = 224, 6.0
NUM_BINS = 512

_LARGEST = tl.constexpr(LARGEST)
_CLOSED, _OPEN, _OPEN_NUCLEUS = tl.constexpr(CLOSED), tl.constexpr(OPEN), tl.constexpr(OPEN_NUCLEUS)
_LOW, _HIGH, _ABOVE = tl.constexpr(LOW), tl.constexpr(HIGH), tl.constexpr(ABOVE)
_WANTED, _BEST, _SUMMED = tl.constexpr(WANTED), tl.constexpr(BEST), tl.constexpr(SUMMED)
_NUM_COLUMNS = tl.constexpr(NUM_COLUMNS)
_FIXED = tl.constexpr(FIXED)
_ROOM = tl.constexpr(1 << 32)
_NO_KEY = tl.constexpr(NO_KEY)
_NUM_COUNTED, _FINE, _FINE_REACH = tl.constexpr(NUM_COUNTED), tl.constexpr(FINE), tl.constexpr(FINE_REACH)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


def reach(width: int) -> float:
    """How far below the likeliest token an edge can lie: what is further down weighs less than the tolerance of top-p,
    1e-6 of the whole, for e^-14 is less.
    """
    return math.log(width) + 14.0


def make_states(num_rows: int, device: torch.device) -> torch.Tensor:
    """Where `find_edges` begins and what it learns: [rows, NUM_COLUMNS] int64. Written for rows in OPEN_NUCLEUS."""
    return torch.empty((num_rows, NUM_COLUMNS), dtype=torch.int64, device=device)


def find_edges(
    rows: LogitRows,
    temperatures: torch.Tensor,
    states: torch.Tensor,
    is_open: torch.Tensor,
    kept: torch.Tensor,
) -> None:
    """Find the smallest key above which there is less than what is wanted, in rows that are OPEN_NUCLEUS.

    Writes `kept` and CLOSED where it is found; OPEN where keys lie so close together that no pass could tell.
    """
    num_rows, width = rows.shape
    num_pieces = triton.cdiv(width, PIECE)
    step = pieces_per_program(num_rows, num_pieces)
    num_programs = triton.cdiv(num_pieces, step)
    # For each pass: how many programs are done, the mass above, and the bins: masses, largest keys, smallest keys.
    tables = torch.zeros((NUM_PASSES, num_rows, 2 + 3 * NUM_BINS), dtype=torch.int64, device=kept.device)
    for number in range(NUM_PASSES):
        _narrow_kernel[(num_rows, num_programs)](
            rows.logits, *rows.kernel_arguments(), temperatures, states, is_open, kept, tables[number],
            temperatures.stride(0), rows.logits.stride(0), tables.stride(1), width, rows.first_id, num_pieces, step,
            reach(width),
            NUMBER=number, IS_LAST=number == NUM_PASSES - 1, HAS_LIMITS=rows.limits is not None,
            HAS_EDITS=rows.edits is not None, PIECE=PIECE, NUM_BINS=NUM_BINS,
            # Masses take twice the registers.
            num_warps=4 if number == 0 else 8, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit
def _add_product(x, y, CONSTANT: tl.constexpr):
    return tl.fma(x, y, tl.zeros_like(x) + CONSTANT)


@triton.jit
def mass(x, best):
    """exp(x - best) for x <= best in float64, to 1e-12; what is below e^-100 counts as that, and -inf as nothing."""
    # A group, or a row, may hold nothing but -inf, and the difference of two of them is no number.
    best = tl.maximum(best, -_LARGEST)
    distance = tl.maximum(x.to(tl.float64) - best.to(tl.float64), -100.0)
    # Which power of two may be estimated, as long as the rest is exact.
    power = tl.floor(tl.maximum(x - best, -100.0) * _LOG2_E + 0.5)
    r = tl.fma(power.to(tl.float64), tl.zeros_like(distance) - _LN_2, distance)
    p = _add_product(r, tl.zeros_like(r) + 1.0 / 3628800.0, 1.0 / 362880.0)
    p = _add_product(p, r, 1.0 / 40320.0)
    p = _add_product(p, r, 1.0 / 5040.0)
    p = _add_product(p, r, 1.0 / 720.0)
    p = _add_product(p, r, 1.0 / 120.0)
    p = _add_product(p, r, 1.0 / 24.0)
    p = _add_product(p, r, 1.0 / 6.0)
    p = _add_product(p, r, 0.5)
    p = _add_product(p, r, 1.0)
    p = _add_product(p, r, 1.0)
    scale = ((power.to(tl.int32).to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(x > -float("inf"), p * scale, 0.0)


@triton.jit
def to_fixed(x):
    """A mass, or a sum of them, as an integer."""
    return (x * _FIXED + 0.5).to(tl.int64)


@triton.jit
def _bin(x, top, scale, reach, IS_COUNT: tl.constexpr, NUM_BINS: tl.constexpr):
    """Number of the bin of a value, from the upper key's on. Every operation rounds the same way for all, and keeps
    the order, so that a bin is a range of keys.
    """
    distance = tl.maximum(top - x, 0.0)
    if IS_COUNT:
        coarse = tl.maximum(distance - _FINE_REACH, 0.0) * scale + _FINE
        number = tl.where(distance < _FINE_REACH, distance * (_FINE / _FINE_REACH), coarse)
        number = tl.minimum(number, _NUM_COUNTED - 1.0).to(tl.int32)
    else:
        number = tl.minimum(distance * scale, NUM_BINS - 1.0).to(tl.int32)
    return number


@triton.jit
def _last_key(low, high, number, top, scale, reach, IS_COUNT: tl.constexpr, NUM_BINS: tl.constexpr):
    """The largest key in (low, high] of a bin from `number` on; `low` when there is none."""
    end = high + 1
    while end - low > 1:
        middle = low + (end - low) // 2
        is_found = _bin(to_value(middle.to(tl.int32)), top, scale, reach, IS_COUNT, NUM_BINS) >= number
        low = tl.where(is_found, middle, low)
        end = tl.where(is_found, end, middle)
    return low


@triton.jit(
    do_not_specialize=["stride_limits", "stride_temperatures", "first_id", "num_pieces", "step", "reach"]
)
def _narrow_kernel(
    logits_ptr, limits_ptr, stride_limits, edits, temperatures_ptr, states_ptr, is_open_ptr, kept_ptr, table_ptr,
    stride_temperatures, stride_logits, stride_table, width, first_id, num_pieces, step, reach,
    NUMBER: tl.constexpr, IS_LAST: tl.constexpr, HAS_LIMITS: tl.constexpr, HAS_EDITS: tl.constexpr,
    PIECE: tl.constexpr, NUM_BINS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_open_ptr + row) == _OPEN_NUCLEUS:
        logits_ptr += row * stride_logits
        states_ptr += row * _NUM_COLUMNS
        table_ptr += row * stride_table
        bins_ptr = table_ptr + 2
        temperature = tl.load(temperatures_ptr + row * stride_temperatures)
        limit = row_limit(limits_ptr, stride_limits, row, first_id, width, HAS_LIMITS)
        flag = row_flag(edits, row, HAS_EDITS)
        low = tl.load(states_ptr + _LOW)
        high = tl.load(states_ptr + _HIGH)
        summed = tl.load(states_ptr + _SUMMED)
        best = tl.load(states_ptr + _BEST).to(tl.int32).to(tl.float32, bitcast=True)
        top = to_value(high.to(tl.int32))
        IS_COUNT: tl.constexpr = NUMBER == 0
        if IS_COUNT:
            scale = (_NUM_COUNTED - _FINE) / (reach - _FINE_REACH)
        else:
            scale = tl.minimum(NUM_BINS / (top - to_value(low.to(tl.int32))), 1e30)

        first = tl.program_id(1) * step
        column = tl.arange(0, PIECE)
        counts = tl.zeros((_NUM_COUNTED,), tl.int32)
        above = tl.zeros((PIECE,), tl.int64)
        for piece in range(first, tl.minimum(first + step, num_pieces)):
            at = piece * PIECE + column
            x = load_logits(logits_ptr, at, at < width, limit, row, flag, edits, HAS_EDITS=HAS_EDITS)
            x = temper(x, temperature)
            key = tl.where(at < width, to_key(x), _NO_KEY)
            is_inside = (key > low.to(tl.int32)) & (key <= high.to(tl.int32))
            number = _bin(x, top, scale, reach, IS_COUNT, NUM_BINS)
            if IS_COUNT:
                counts += tl.histogram(tl.where(is_inside, number, 0), _NUM_COUNTED, mask=is_inside)
            else:
                weight = to_fixed(mass(x, best))
                if NUMBER == 1:
                    above += tl.where((key > high.to(tl.int32)) & (key <= summed.to(tl.int32)), weight, 0)
                tl.atomic_add(bins_ptr + number, weight, mask=is_inside, sem="relaxed")
                if NUMBER > 1:
                    # Where nothing comes it stays 0: of the largest key, and of the smallest turned round.
                    wide = key.to(tl.int64)
                    tl.atomic_max(bins_ptr + NUM_BINS + number, wide + _ROOM, mask=is_inside, sem="relaxed")
                    tl.atomic_max(
                        bins_ptr + 2 * NUM_BINS + number, -wide + _ROOM, mask=is_inside, sem="relaxed"
                    )
        if IS_COUNT:
            tl.atomic_add(bins_ptr + tl.arange(0, _NUM_COUNTED), counts.to(tl.int64), sem="relaxed")
        if NUMBER == 1:
            tl.atomic_add(table_ptr + 1, tl.sum(above, 0), sem="relaxed")

        tl.debug_barrier()
        if tl.atomic_add(table_ptr, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            wanted = tl.load(states_ptr + _WANTED)
            mass_above = tl.load(states_ptr + _ABOVE)
            if IS_COUNT:
                number = tl.arange(0, _NUM_COUNTED)
                count = tl.load(bins_ptr + number).to(tl.float64)
                fine = number.to(tl.float32) * (_FINE_REACH / _FINE)
                coarse = (number - _FINE).to(tl.float32) / scale + _FINE_REACH
                near = tl.where(number < _FINE, fine, coarse)
                width_of_bin = tl.where(number < _FINE, _FINE_REACH / _FINE, 1.0 / scale)
                # Some room for what float32 rounds.
                most = tl.exp(top - best - near + 1e-3).to(tl.float64) * _FIXED
                least = tl.exp(top - best - near - width_of_bin - 1e-3).to(tl.float64) * _FIXED
                least = tl.where(number == _NUM_COUNTED - 1, 0.0, least)
                known = mass_above.to(tl.float64)
                target = wanted.to(tl.float64)
                begin = tl.sum((known + tl.cumsum(count * most, 0) < target).to(tl.int32), 0)
                end = tl.sum((known + tl.cumsum(count * least, 0) < target).to(tl.int32), 0)
                new_high = _last_key(low, high, begin, top, scale, reach, IS_COUNT, NUM_BINS)
                new_low = _last_key(low, high, end + 1, top, scale, reach, IS_COUNT, NUM_BINS)
            else:
                number = tl.arange(0, NUM_BINS)
                weights = tl.load(bins_ptr + number)
                if NUMBER == 1:
                    mass_above += tl.load(table_ptr + 1)
                begin = tl.sum((mass_above + tl.cumsum(weights, 0) < wanted).to(tl.int32), 0)
                mass_above += tl.sum(tl.where(number < begin, weights, 0), 0)
                if NUMBER == 1:
                    new_high = _last_key(low, high, begin, top, scale, reach, IS_COUNT, NUM_BINS)
                    new_low = _last_key(low, high, begin + 1, top, scale, reach, IS_COUNT, NUM_BINS)
                else:
                    slot = tl.minimum(begin, NUM_BINS - 1)
                    new_high = tl.load(bins_ptr + NUM_BINS + slot) - _ROOM
                    new_low = -tl.load(bins_ptr + 2 * NUM_BINS + slot) + (_ROOM - 1)
                # The edge is in no bin: sums of both kinds are rounded, and the mass wanted lies just between them.
                new_high = tl.where(begin == NUM_BINS, new_low, new_high)
            state = tl.where(new_high <= new_low, _OPEN, _OPEN if IS_LAST else _OPEN_NUCLEUS)
            state = tl.where(new_high - new_low == 1, _CLOSED, state)
            if state == _CLOSED:
                tl.store(kept_ptr + row, to_value(new_high.to(tl.int32)))
            tl.store(is_open_ptr + row, state)
            tl.store(states_ptr + _LOW, new_low)
            tl.store(states_ptr + _HIGH, new_high)
            tl.store(states_ptr + _ABOVE, mass_above)
            if not IS_COUNT:
                tl.store(states_ptr + _SUMMED, new_high)
