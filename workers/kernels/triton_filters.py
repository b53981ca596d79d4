"""min-p, top-k and top-p in Triton kernels, for CUDA: the smallest logit of each row that may be drawn.

Called by: workers/fused_sampling.py. The reference is workers/sampling_filters.py. Nothing is sorted:

1. The row is read once, and the largest logit of each GROUP adjacent ids noted down (for a nucleus of the whole row
   also their mass).
2. One program a row picks the groups with the NUM_CHOSEN largest of these: whatever exceeds the smallest of them lies
   in a chosen group, and so do the NUM_CHOSEN likeliest tokens. The thresholds are found among their tokens alone, by
   bisection over the floats in their order.
3. Where the edge of a nucleus lies lower (a flat row), triton_nucleus.py finds it in a few passes over the row.
4. What is left (a large top-k, a tie of very many) is bisected as a whole, with NUM_PIVOTS pivots in each pass.

Masses are float64 sums of exponentials that are exact to 1e-12, as the reference's, in another order: a threshold can
differ from the reference's only when a nucleus ends within that of the mass wanted. No call waits for the device.
"""

import torch
import triton
import triton.language as tl

from ..logit_processors import LARGEST
from ..sampling_filters import TOP_P_TOLERANCE
from .triton_draw import GROUP, PIECE, pieces_per_program
from .triton_nucleus import (
    ABOVE,
    BEST,
    HIGH,
    LOW,
    NUM_COLUMNS,
    OPEN,
    OPEN_NUCLEUS,
    SUMMED,
    WANTED,
    find_edges,
    make_states,
    mass,
    reach,
    to_fixed,
)
from .triton_rows import (
    KEY_OF_NOTHING,
    NO_KEY,
    LogitRows,
    load_logits,
    row_flag,
    row_limit,
    temper,
    to_key,
    to_value,
)

FEW_CHOSEN, MANY_CHOSEN = 64, 256
"""Groups looked at: where the largest top-k is known to be small, and else."""
NUM_PIVOTS = 8

_LARGEST = tl.constexpr(LARGEST)
_TOLERANCE = tl.constexpr(TOP_P_TOLERANCE)
_NO_KEY = tl.constexpr(NO_KEY)
_KEY_OF_NOTHING = tl.constexpr(KEY_OF_NOTHING)
_OPEN, _OPEN_NUCLEUS = tl.constexpr(OPEN), tl.constexpr(OPEN_NUCLEUS)
_LOW, _HIGH, _ABOVE = tl.constexpr(LOW), tl.constexpr(HIGH), tl.constexpr(ABOVE)
_WANTED, _BEST, _SUMMED = tl.constexpr(WANTED), tl.constexpr(BEST), tl.constexpr(SUMMED)
_NUM_COLUMNS = tl.constexpr(NUM_COLUMNS)


def find_thresholds(
    rows: LogitRows,
    *,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    max_top_k: int,
    has_open_nucleus: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest tempered logit of each row that may be drawn, [rows] float32, -inf for greedy rows; and the
    largest tempered logit of each GROUP ids, [rows, groups] float32. The parameters are as in SamplingBatch.
    """
    num_rows, width = rows.shape
    logits = rows.logits
    num_groups = triton.cdiv(width, GROUP)
    device = logits.device
    kept = torch.empty(num_rows, dtype=torch.float32, device=device)
    group_best = torch.empty((num_rows, num_groups), dtype=torch.float32, device=device)
    if num_rows == 0:
        return kept, group_best
    mass_shape = (num_rows, num_groups) if has_open_nucleus else (1, 1)
    group_mass = torch.empty(mass_shape, dtype=torch.float64, device=device)
    num_pieces = triton.cdiv(width, PIECE)
    step = pieces_per_program(num_rows, num_pieces)
    parameters = (temperatures, top_ks, top_ps)
    strides = tuple(parameter.stride(0) for parameter in parameters)
    seen = (*rows.kernel_arguments(), rows.first_id)
    settings = {"HAS_LIMITS": rows.limits is not None, "HAS_EDITS": rows.edits is not None, "GROUP": GROUP}
    _group_kernel[(num_rows, triton.cdiv(num_pieces, step))](
        logits, *seen, *parameters, group_best, group_mass, *strides, logits.stride(0), width, num_pieces,
        num_groups, step, HAS_MASS=has_open_nucleus, PIECE=PIECE, num_warps=4, **settings,
    )  # fmt: skip
    num_chosen = FEW_CHOSEN if max_top_k <= FEW_CHOSEN and not has_open_nucleus else MANY_CHOSEN
    chosen = torch.empty((num_rows, num_chosen), dtype=torch.int32, device=device)
    is_open = torch.empty(num_rows, dtype=torch.int32, device=device)
    states = make_states(num_rows if has_open_nucleus else 1, device)
    # The same operation as the reference's, for the same bits.
    log_min_ps = min_ps.log()
    _threshold_kernel[(num_rows,)](
        logits, *seen, *parameters, log_min_ps, group_best, group_mass, chosen, states, is_open, kept, *strides,
        logits.stride(0), width, num_groups, reach(width),
        HAS_MASS=has_open_nucleus, NUM_GROUPS_PAD=triton.next_power_of_2(num_groups), NUM_CHOSEN=num_chosen,
        num_warps=8 if num_chosen == FEW_CHOSEN else 16, **settings,
    )  # fmt: skip
    if num_groups > num_chosen:
        if has_open_nucleus:
            find_edges(rows, temperatures, states, is_open, kept)
        _whole_row_kernel[(num_rows,)](
            logits, *seen, *parameters, log_min_ps, group_best, is_open, kept, *strides, logits.stride(0), width,
            num_groups,
            NUM_GROUPS_PAD=triton.next_power_of_2(num_groups), BLOCK=4096, NUM_PIVOTS=NUM_PIVOTS, num_warps=16,
            **settings,
        )  # fmt: skip
    return kept, group_best


_STRIDES = ["stride_temperatures", "stride_top_ks", "stride_top_ps", "stride_limits", "first_id"]


@triton.jit(do_not_specialize=[*_STRIDES, "num_pieces", "num_groups", "step"])
def _group_kernel(
    logits_ptr, limits_ptr, stride_limits, edits, first_id, temperatures_ptr, top_ks_ptr, top_ps_ptr, group_best_ptr,
    group_mass_ptr, stride_temperatures, stride_top_ks, stride_top_ps, stride_logits, width, num_pieces, num_groups,
    step, HAS_MASS: tl.constexpr, PIECE: tl.constexpr, HAS_LIMITS: tl.constexpr, HAS_EDITS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * step
    logits_ptr += row * stride_logits
    temperature = tl.load(temperatures_ptr + row * stride_temperatures)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    needs_mass = False
    if HAS_MASS:
        top_k = tl.load(top_ks_ptr + row * stride_top_ks)
        top_p = tl.load(top_ps_ptr + row * stride_top_ps)
        needs_mass = (temperature != 0.0) & (top_k == 0) & (top_p < 1.0)
    limit = row_limit(limits_ptr, stride_limits, row, first_id, width, HAS_LIMITS)
    flag = row_flag(edits, row, HAS_EDITS)
    column = tl.arange(0, PIECE)
    in_piece = tl.arange(0, PIECE // GROUP)
    for piece in range(first, tl.minimum(first + step, num_pieces)):
        at = piece * PIECE + column
        x = load_logits(logits_ptr, at, at < width, limit, row, flag, edits, HAS_EDITS=HAS_EDITS)
        x = tl.reshape(tl.minimum(x, _LARGEST), (PIECE // GROUP, GROUP))
        # Rounding keeps the order, so the largest of the quotients is the quotient of the largest.
        largest = tl.max(x, 1)
        best = tl.div_rn(largest, tl.zeros_like(largest) + divisor)
        group = piece * (PIECE // GROUP) + in_piece
        tl.store(group_best_ptr + row * num_groups + group, best, mask=group < num_groups)
        if HAS_MASS:
            if needs_mass:
                tempered = tl.div_rn(x, tl.zeros_like(x) + divisor)
                masses = tl.sum(mass(tempered, tl.expand_dims(best, 1)), 1)
                tl.store(group_mass_ptr + row * num_groups + group, masses, mask=group < num_groups)


@triton.jit(do_not_specialize=[*_STRIDES, "num_groups", "reach"])
def _threshold_kernel(
    logits_ptr, limits_ptr, stride_limits, edits, first_id, temperatures_ptr, top_ks_ptr, top_ps_ptr, log_min_ps_ptr,
    group_best_ptr, group_mass_ptr, chosen_ptr, states_ptr, is_open_ptr, kept_ptr, stride_temperatures, stride_top_ks,
    stride_top_ps, stride_logits, width, num_groups, reach,
    HAS_MASS: tl.constexpr, NUM_GROUPS_PAD: tl.constexpr, NUM_CHOSEN: tl.constexpr, HAS_LIMITS: tl.constexpr,
    HAS_EDITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    temperature = tl.load(temperatures_ptr + row * stride_temperatures)
    top_k = tl.load(top_ks_ptr + row * stride_top_ks)
    top_p = tl.load(top_ps_ptr + row * stride_top_ps)
    log_min_p = tl.load(log_min_ps_ptr + row)
    needs_nucleus = top_p < 1.0
    is_open = 0
    kept = tl.full((), -float("inf"), tl.float32)
    if (temperature != 0.0) & ((top_k > 0) | needs_nucleus | (log_min_p > -float("inf"))):
        group = tl.arange(0, NUM_GROUPS_PAD)
        is_group = group < num_groups
        group_best = tl.load(group_best_ptr + row * num_groups + group, mask=is_group, other=-float("inf"))
        best = tl.max(group_best, 0)
        # In float32 a sum may round up past the largest value itself.
        kept = tl.minimum(best + log_min_p, best)
        if (top_k > 0) | needs_nucleus:
            floor_key = to_key(kept)
            best_key = to_key(best)
            group_key = tl.where(is_group, to_key(group_best), _NO_KEY)
            num_chosen = tl.minimum(num_groups, NUM_CHOSEN)
            # The largest key that as many groups reach as are to be chosen.
            low = tl.min(tl.where(is_group, group_key, best_key), 0).to(tl.int64)
            high = best_key.to(tl.int64) + 1
            while high - low > 1:
                middle = low + (high - low) // 2
                is_reached = tl.sum((group_key >= middle.to(tl.int32)).to(tl.int32), 0) >= num_chosen
                low = tl.where(is_reached, middle, low)
                high = tl.where(is_reached, high, middle)
            edge = low.to(tl.int32)
            is_above = group_key > edge
            is_at_edge = group_key == edge
            num_left = num_chosen - tl.sum(is_above.to(tl.int32), 0)
            is_chosen = is_above | (is_at_edge & (tl.cumsum(is_at_edge.to(tl.int32), 0) <= num_left))
            place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
            tl.store(chosen_ptr + row * NUM_CHOSEN + place, group, mask=is_chosen)
            # The chosen groups hold every token from this key on.
            covered = tl.where(tl.sum(is_at_edge.to(tl.int32), 0) <= num_left, edge, edge + 1)
            covered = tl.where(num_chosen == num_groups, _KEY_OF_NOTHING, covered)

            tl.debug_barrier()
            slot = tl.arange(0, NUM_CHOSEN)
            own = tl.load(chosen_ptr + row * NUM_CHOSEN + slot, mask=slot < num_chosen, other=-1)
            at = own[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            is_token = (own[:, None] >= 0) & (at < width)
            limit = row_limit(limits_ptr, stride_limits, row, first_id, width, HAS_LIMITS)
            flag = row_flag(edits, row, HAS_EDITS)
            x = load_logits(logits_ptr, at, is_token, limit, row, flag, edits, HAS_EDITS=HAS_EDITS)
            x = temper(x, temperature)
            key = tl.where(is_token, to_key(x), _NO_KEY)

            if top_k > 0:
                if (top_k <= num_chosen) | (num_chosen == num_groups):
                    low = tl.where(num_chosen == num_groups, _KEY_OF_NOTHING, edge).to(tl.int64)
                    high = best_key.to(tl.int64) + 1
                    while high - low > 1:
                        middle = low + (high - low) // 2
                        is_reached = tl.sum(tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 1), 0) >= top_k
                        low = tl.where(is_reached, middle, low)
                        high = tl.where(is_reached, high, middle)
                    floor_key = tl.maximum(floor_key, low.to(tl.int32))
                else:
                    is_open = _OPEN
            if needs_nucleus:
                masses = mass(x, best)
                whole = tl.sum(tl.sum(tl.where(key >= floor_key, masses, 0.0), 1), 0)
                if floor_key < covered:
                    if HAS_MASS:
                        if (top_k == 0) & (floor_key == _KEY_OF_NOTHING):
                            group_mass = tl.load(
                                group_mass_ptr + row * num_groups + group, mask=is_group, other=0.0
                            )
                            whole = tl.sum(group_mass * mass(group_best, best), 0)
                        else:
                            is_open = _OPEN
                    else:
                        is_open = _OPEN
                wanted = (top_p.to(tl.float64) - _TOLERANCE) * whole
                # The smallest key above which there is less than what is wanted.
                low = tl.maximum(floor_key.to(tl.int64), covered.to(tl.int64) - 1)
                high = tl.maximum(best_key.to(tl.int64), low)
                mass_above = tl.sum(tl.sum(tl.where(key > low.to(tl.int32), masses, 0.0), 1), 0)
                if mass_above < wanted:
                    # It is the floor itself, or lies below what the chosen groups hold.
                    if low > floor_key.to(tl.int64):
                        is_open = _OPEN
                        if HAS_MASS:
                            lowest = to_key(best - reach).to(tl.int64)
                            if (top_k == 0) & (floor_key == _KEY_OF_NOTHING) & (lowest < low):
                                is_open = _OPEN_NUCLEUS
                                states_ptr += row * _NUM_COLUMNS
                                tl.store(states_ptr + _LOW, lowest)
                                tl.store(states_ptr + _HIGH, low)
                                tl.store(states_ptr + _SUMMED, low)
                                tl.store(states_ptr + _ABOVE, to_fixed(mass_above))
                                tl.store(states_ptr + _WANTED, to_fixed(wanted))
                                tl.store(states_ptr + _BEST, best.to(tl.int32, bitcast=True).to(tl.int64))
                    high = low
                while high - low > 1:
                    middle = low + (high - low) // 2
                    above = tl.sum(tl.sum(tl.where(key > middle.to(tl.int32), masses, 0.0), 1), 0)
                    high = tl.where(above < wanted, middle, high)
                    low = tl.where(above < wanted, low, middle)
                floor_key = high.to(tl.int32)
            if is_open == 0:
                kept = to_value(floor_key)
    tl.store(kept_ptr + row, kept)
    tl.store(is_open_ptr + row, is_open)


@triton.jit(do_not_specialize=[*_STRIDES, "num_groups"])
def _whole_row_kernel(
    logits_ptr, limits_ptr, stride_limits, edits, first_id, temperatures_ptr, top_ks_ptr, top_ps_ptr, log_min_ps_ptr,
    group_best_ptr, is_open_ptr, kept_ptr, stride_temperatures, stride_top_ks, stride_top_ps, stride_logits, width,
    num_groups, NUM_GROUPS_PAD: tl.constexpr, BLOCK: tl.constexpr, NUM_PIVOTS: tl.constexpr,
    HAS_LIMITS: tl.constexpr, HAS_EDITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_open_ptr + row) == _OPEN:
        logits_ptr += row * stride_logits
        temperature = tl.load(temperatures_ptr + row * stride_temperatures)
        top_k = tl.load(top_ks_ptr + row * stride_top_ks)
        top_p = tl.load(top_ps_ptr + row * stride_top_ps)
        group = tl.arange(0, NUM_GROUPS_PAD)
        group_best = tl.load(
            group_best_ptr + row * num_groups + group, mask=group < num_groups, other=-float("inf")
        )
        best = tl.max(group_best, 0)
        best_key = to_key(best).to(tl.int64)
        floor_key = to_key(tl.minimum(best + tl.load(log_min_ps_ptr + row), best)).to(tl.int64)
        column = tl.arange(0, BLOCK)
        pivot = tl.arange(1, NUM_PIVOTS + 1).to(tl.int64)
        limit = row_limit(limits_ptr, stride_limits, row, first_id, width, HAS_LIMITS)
        flag = row_flag(edits, row, HAS_EDITS)
        if top_k > 0:
            # The largest key that top_k tokens reach.
            low = tl.full((), _KEY_OF_NOTHING, tl.int64)
            high = best_key + 1
            while high - low > 1:
                step = (high - low + NUM_PIVOTS - 1) // NUM_PIVOTS
                pivots = tl.minimum(low + step * pivot, high)
                counts = tl.zeros((NUM_PIVOTS,), tl.int32)
                for start in range(0, width, BLOCK):
                    at = start + column
                    x = load_logits(logits_ptr, at, at < width, limit, row, flag, edits, HAS_EDITS=HAS_EDITS)
                    key = to_key(temper(x, temperature))
                    key = tl.where(at < width, key, _NO_KEY)
                    is_reached = key[None, :] >= pivots.to(tl.int32)[:, None]
                    counts += tl.sum(is_reached.to(tl.int32), 1)
                num_reached = tl.sum(((counts >= top_k) & (pivots < high)).to(tl.int64), 0)
                low += step * num_reached
                high = tl.minimum(high, low + step)
            floor_key = tl.maximum(floor_key, low)
        if top_p < 1.0:
            whole = tl.full((), 0.0, tl.float64)
            for start in range(0, width, BLOCK):
                at = start + column
                x = load_logits(logits_ptr, at, at < width, limit, row, flag, edits, HAS_EDITS=HAS_EDITS)
                x = temper(x, temperature)
                whole += tl.sum(tl.where(to_key(x) >= floor_key.to(tl.int32), mass(x, best), 0.0), 0)
            wanted = (top_p.to(tl.float64) - _TOLERANCE) * whole
            # The smallest key above which there is less than what is wanted.
            low = floor_key - 1
            high = best_key
            while high - low > 1:
                step = (high - low + NUM_PIVOTS - 1) // NUM_PIVOTS
                pivots = tl.minimum(low + step * pivot, high)
                above = tl.zeros((NUM_PIVOTS,), tl.float64)
                for start in range(0, width, BLOCK):
                    at = start + column
                    x = load_logits(logits_ptr, at, at < width, limit, row, flag, edits, HAS_EDITS=HAS_EDITS)
                    x = temper(x, temperature)
                    is_above = to_key(x)[None, :] > pivots.to(tl.int32)[:, None]
                    above += tl.sum(tl.where(is_above, mass(x, best)[None, :], 0.0), 1)
                num_above = tl.sum(((above >= wanted) & (pivots < high)).to(tl.int64), 0)
                low += step * num_above
                high = tl.minimum(high, low + step)
            floor_key = high
        tl.store(kept_ptr + row, to_value(floor_key.to(tl.int32)))
