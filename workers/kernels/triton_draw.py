"""The choice of one token for each row in Triton kernels, for CUDA: greedy, or drawn by the Gumbel-max rule.

Called by: workers/fused_sampling.py, and decode_step.py inside a CUDA graph (`draw`). The reference is the torch path
of workers/sampler.py; the tokens are the same.

Rows are cut into pieces of PIECE ids. The first kernel reads the logits once, in their own type, and estimates in
float32 the best score of each piece: many programs a row, so that few rows keep a GPU busy as well. The second has one
program a row: a piece whose estimate comes close enough to the row's best is looked at again, with the noise of the
reference in float64 and a tie for the lowest id. That is one piece, seldom two.

Noise costs more than reading. A piece that cannot reach the best score so far even with the largest noise gets none,
and a piece below the row's threshold is not even read when its largest logits are known (`group_best`).

No call waits for the device, and all of them may be captured into a CUDA graph.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .. import noise
from ..logit_processors import LARGEST
from .dependent_launch import dependent_launch, wait_for_previous
from .triton_noise import ESTIMATE_ERROR, estimate_gumbel, gumbel, philox
from .triton_rows import LogitRows, load_logits, row_flag, row_limit, temper

PIECE = 2048
GROUP = 64
"""Adjacent ids whose largest logit `triton_filters.py` notes down."""
MIN_PROGRAMS = 1056
"""Eight for each multiprocessor of the largest GPUs of today."""

_MAX_GUMBEL = tl.constexpr(noise.MAX_GUMBEL + ESTIMATE_ERROR)
_ESTIMATE_ERROR = tl.constexpr(ESTIMATE_ERROR)
_LARGEST = tl.constexpr(LARGEST)
_NO_ID = tl.constexpr(0x7FFFFFFF)


def pieces_per_program(num_rows: int, num_pieces: int) -> int:
    """Cut rows for enough programs, however few the rows are."""
    programs_per_row = max(1, min(num_pieces, MIN_PROGRAMS // max(1, num_rows)))
    return triton.cdiv(num_pieces, programs_per_row)


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    sample_positions: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    vocab_limits: torch.Tensor,
    last_tokens: torch.Tensor,
) -> torch.Tensor:
    """Choose one token for each row, and note it as the row's last.

    logits:           [n, vocab_size], any float type
    rows:             [n] int64, of the tensors below
    sample_positions: [n] int64, index of the token among its request's output tokens
    temperatures:     [all rows] float32; 0: greedy
    seeds, vocab_limits, last_tokens: [all rows] int64; the last is written; ids from the limit on are not drawn
    returns           [n] int64
    """
    return draw_part(logits, rows, sample_positions, temperatures, seeds, vocab_limits, last_tokens)[1]


def draw_part(
    logits: torch.Tensor,
    rows: torch.Tensor,
    sample_positions: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    vocab_limits: torch.Tensor,
    last_tokens: torch.Tensor,
    *,
    first_id: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `draw`, from some columns of the logits: the best score of each row there, float64, and its token, int64.

    logits: [n, width]; first_id: token id of the first column, a multiple of 4
    """
    seen = LogitRows(logits=logits, first_id=first_id, limits=vocab_limits)
    state = _RowState(rows=rows, last_tokens=last_tokens)
    return _choose(seen, temperatures, seeds, sample_positions, state=state)


def choose_tokens(
    rows: LogitRows,
    *,
    temperatures: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    group_best: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best score of each row, float64, and the token that has it, int64: both [rows].

    temperatures: [rows] float32, 0: greedy; None: all rows are. With it seeds and positions: [rows] int64
    kept:         [rows] float32, smallest tempered logit that may be drawn; None: any
    group_best:   [rows, groups] float32, the largest tempered logit of each GROUP ids, to skip by; with `kept`
    """
    assert rows.first_id % 4 == 0, "four adjacent ids share one evaluation"
    return _choose(rows, temperatures, seeds, positions, kept=kept, group_best=group_best)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowState:
    """Where the parameters of the logits' rows stand, limits included; see `draw`."""

    rows: torch.Tensor
    last_tokens: torch.Tensor


def _choose(
    rows: LogitRows,
    temperatures: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    *,
    kept: torch.Tensor | None = None,
    group_best: torch.Tensor | None = None,
    state: _RowState | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, width = rows.shape
    logits = rows.logits
    num_pieces = triton.cdiv(width, PIECE)
    scores = torch.empty(num_rows, dtype=torch.float64, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return scores, token_ids
    estimates = torch.empty((num_rows, num_pieces), dtype=torch.float32, device=logits.device)
    # What a kernel does not read may be any pointer.
    parameters = [estimates if x is None else x for x in (temperatures, seeds, positions, kept)]
    # Parameters may be columns of a table.
    strides = [x.stride(0) for x in parameters[:3]]
    step = pieces_per_program(num_rows, num_pieces)
    has_group_best = group_best is not None and kept is not None
    settings = {
        "IS_RANDOM": temperatures is not None,
        "HAS_KEPT": kept is not None,
        "HAS_STATE": state is not None,
        "HAS_LIMITS": rows.limits is not None,
        "HAS_EDITS": rows.edits is not None,
    }
    _estimate_kernel[(num_rows, triton.cdiv(num_pieces, step))](
        logits, *parameters, token_ids if state is None else state.rows, *rows.kernel_arguments(),
        group_best if has_group_best else estimates, estimates, *strides, logits.stride(0), width, num_pieces,
        rows.first_id, 0 if group_best is None else group_best.shape[1], step,
        HAS_GROUP_BEST=has_group_best, PIECE=PIECE, GROUP=GROUP, num_warps=4, **settings,
        **dependent_launch(logits.device),
    )  # fmt: skip
    _finish_kernel[(num_rows,)](
        logits, *parameters, token_ids if state is None else state.rows, *rows.kernel_arguments(),
        token_ids if state is None else state.last_tokens, estimates, scores, token_ids, *strides, logits.stride(0),
        width, num_pieces, rows.first_id,
        PIECE=PIECE, NUM_PIECES_PAD=triton.next_power_of_2(num_pieces), num_warps=4, enable_fp_fusion=False,
        **settings, **dependent_launch(logits.device),
    )  # fmt: skip
    return scores, token_ids


@triton.jit
def _quarters(x, QUADS: tl.constexpr):
    """[4 * QUADS] apart by the remainder of 4."""
    even, odd = tl.split(tl.reshape(x, (QUADS, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _source(rows_ptr, row, HAS_STATE: tl.constexpr):
    """Where the parameters of a row stand."""
    source = row
    if HAS_STATE:
        source = tl.load(rows_ptr + row)
    return source


@triton.jit
def _how_to_draw(
    temperatures_ptr, seeds_ptr, positions_ptr, stride_temperatures, stride_seeds, stride_positions, row, source,
    IS_RANDOM: tl.constexpr,
):  # fmt: skip
    """Temperature, what logits are divided by, seed and position of a row."""
    temperature = 0.0
    seed = row
    position = row
    if IS_RANDOM:
        temperature = tl.load(temperatures_ptr + source * stride_temperatures)
        seed = tl.load(seeds_ptr + source * stride_seeds)
        position = tl.load(positions_ptr + row * stride_positions)
    return temperature, tl.where(temperature == 0.0, 1.0, temperature), seed, position


_STRIDES = ["stride_temperatures", "stride_seeds", "stride_positions", "stride_limits"]


@triton.jit(do_not_specialize=[*_STRIDES, "num_pieces", "first_id", "num_groups", "step"])
def _estimate_kernel(
    logits_ptr, temperatures_ptr, seeds_ptr, positions_ptr, kept_ptr, rows_ptr, limits_ptr, stride_limits, edits,
    group_best_ptr, estimates_ptr, stride_temperatures, stride_seeds, stride_positions, stride_logits, width,
    num_pieces, first_id, num_groups, step,
    IS_RANDOM: tl.constexpr, HAS_KEPT: tl.constexpr, HAS_STATE: tl.constexpr, HAS_LIMITS: tl.constexpr,
    HAS_EDITS: tl.constexpr, HAS_GROUP_BEST: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * step
    logits_ptr += row * stride_logits
    column = tl.arange(0, PIECE)
    group = tl.arange(0, PIECE // GROUP)
    source = _source(rows_ptr, row, HAS_STATE)
    limit = row_limit(limits_ptr, stride_limits, source, first_id, width, HAS_LIMITS)
    flag = row_flag(edits, row, HAS_EDITS)
    temperature, divisor, seed, position = _how_to_draw(
        temperatures_ptr, seeds_ptr, positions_ptr, stride_temperatures, stride_seeds, stride_positions, row, source,
        IS_RANDOM,
    )  # fmt: skip
    inverse = 1.0 / divisor
    kept = -float("inf")
    if HAS_KEPT:
        kept = tl.load(kept_ptr + row)
    reached = -float("inf")
    for piece in range(first, tl.minimum(first + step, num_pieces)):
        estimate = -float("inf")
        may_count = True
        if HAS_GROUP_BEST:
            number = piece * (PIECE // GROUP) + group
            best = tl.load(
                group_best_ptr + row * num_groups + number, mask=number < num_groups, other=-float("inf")
            )
            may_count = tl.max(best, 0) >= kept
        if may_count:
            at = piece * PIECE + column
            x = load_logits(logits_ptr, at, at < width, limit, row, flag, edits, HAS_EDITS=HAS_EDITS)
            if IS_RANDOM:
                if HAS_KEPT:
                    x = temper(x, divisor)
                    x = tl.where(x >= kept, x, -float("inf"))
                else:
                    x = tl.minimum(x, _LARGEST) * inverse
            estimate = tl.max(x, 0)
            if IS_RANDOM:
                if (temperature != 0.0) & (estimate + _MAX_GUMBEL >= reached - tl.abs(reached) * 1e-6):
                    quad = (first_id + piece * PIECE) // 4 + tl.arange(0, PIECE // 4)
                    w0, w1, w2, w3 = philox(quad, position, seed)
                    x0, x1, x2, x3 = _quarters(x, PIECE // 4)
                    best01 = tl.maximum(x0 + estimate_gumbel(w0), x1 + estimate_gumbel(w1))
                    best23 = tl.maximum(x2 + estimate_gumbel(w2), x3 + estimate_gumbel(w3))
                    estimate = tl.max(tl.maximum(best01, best23), 0)
                    reached = tl.maximum(reached, estimate)
                elif temperature != 0.0:
                    estimate = -float("inf")
        tl.store(estimates_ptr + row * num_pieces + piece, estimate)


@triton.jit(do_not_specialize=[*_STRIDES, "num_pieces", "first_id"])
def _finish_kernel(
    logits_ptr, temperatures_ptr, seeds_ptr, positions_ptr, kept_ptr, rows_ptr, limits_ptr, stride_limits, edits,
    last_tokens_ptr, estimates_ptr, scores_ptr, token_ids_ptr, stride_temperatures, stride_seeds, stride_positions,
    stride_logits, width, num_pieces, first_id,
    IS_RANDOM: tl.constexpr, HAS_KEPT: tl.constexpr, HAS_STATE: tl.constexpr, HAS_LIMITS: tl.constexpr,
    HAS_EDITS: tl.constexpr, PIECE: tl.constexpr, NUM_PIECES_PAD: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    column = tl.arange(0, PIECE)
    source = _source(rows_ptr, row, HAS_STATE)
    limit = row_limit(limits_ptr, stride_limits, source, first_id, width, HAS_LIMITS)
    flag = row_flag(edits, row, HAS_EDITS)
    temperature, divisor, seed, position = _how_to_draw(
        temperatures_ptr, seeds_ptr, positions_ptr, stride_temperatures, stride_seeds, stride_positions, row, source,
        IS_RANDOM,
    )  # fmt: skip
    kept = -float("inf")
    if HAS_KEPT:
        kept = tl.load(kept_ptr + row)
    pieces = tl.arange(0, NUM_PIECES_PAD)
    estimates = tl.load(
        estimates_ptr + row * num_pieces + pieces, mask=pieces < num_pieces, other=-float("inf")
    )
    bound = tl.max(estimates, 0)
    if temperature != 0.0:
        # Both estimates may be wrong, by what float32 rounds of a logit and by the error of the noise.
        bound -= 4.0 * (_ESTIMATE_ERROR + (tl.abs(bound) + 40.0) * 2.5e-7)
    is_open = (estimates >= bound) & (pieces < num_pieces)
    best_score = tl.full((), -float("inf"), tl.float64)
    best_id = tl.full((), _NO_ID, tl.int32)
    piece = tl.min(tl.where(is_open, pieces, _NO_ID), 0)
    while piece < _NO_ID:
        at = piece * PIECE + column
        x = load_logits(logits_ptr, at, at < width, limit, row, flag, edits, HAS_EDITS=HAS_EDITS)
        if IS_RANDOM:
            x = temper(x, divisor)
        score = x.to(tl.float64)
        if IS_RANDOM:
            if temperature != 0.0:
                quad = (first_id + piece * PIECE) // 4 + tl.arange(0, PIECE // 4)
                w0, w1, w2, w3 = philox(quad, position, seed)
                even = tl.join(gumbel(w0), gumbel(w2))
                odd = tl.join(gumbel(w1), gumbel(w3))
                score += tl.reshape(tl.join(even, odd), (PIECE,))
                if HAS_KEPT:
                    score = tl.where(x >= kept, score, -float("inf"))
        piece_score = tl.max(score, 0)
        piece_id = tl.min(tl.where((score == piece_score) & (at < limit), at, _NO_ID), 0)
        # Pieces come in the order of their ids: of equal ones the first stays.
        is_better = (piece_score > best_score) | (best_id == _NO_ID)
        best_score = tl.where(is_better, piece_score, best_score)
        best_id = tl.where(is_better, piece_id, best_id)
        piece = tl.min(tl.where(is_open & (pieces > piece), pieces, _NO_ID), 0)
    # No token is the best of a row that is not of numbers; padding may be such a row.
    token_id = (first_id + tl.where(best_id == _NO_ID, 0, best_id)).to(tl.int64)
    tl.store(scores_ptr + row, best_score)
    tl.store(token_ids_ptr + row, token_id)
    if HAS_STATE:
        tl.store(last_tokens_ptr + source, token_id)
