"""The logits of rows as the sampler's kernels read them: cut at the vocabulary, masked and changed on the way.

Called by: the other kernels of the sampler (draw, filters, nucleus, logprobs, edits), workers/fused_sampling.py and
workers/prompt_logprobs.py. Nothing is written back: what is done to a row stands beside it as bits for each id, and the
kernels look at them as they read.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..logit_processors import LARGEST

NO_KEY = -(2**31)
"""Below the key of every number."""
KEY_OF_NOTHING = -2139095041
"""The key of -inf."""

_LARGEST = tl.constexpr(LARGEST)


class RowEdits(NamedTuple):
    """What is done to the logits of each row before a token is chosen.

    flags:     [rows] int32; 0: nothing, and the row's other entries are not read
    allowed:   [rows, num_words] int32, bit j of word i for column 32 * i + j: it may be chosen
    changed:   the same shape; its logit is the one in `replaced`
    replaced:  [rows, width] float32, anything where no bit says so; within LARGEST, or -inf. No rows: no bit does
    num_words, width: as above
    """

    flags: torch.Tensor
    allowed: torch.Tensor
    changed: torch.Tensor
    replaced: torch.Tensor
    num_words: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRows:
    """Rows of logits, and what is to be seen of them.

    logits:   [rows, width], any float type, neighbours side by side; never written
    first_id: token id of the first column, a multiple of 64
    limits:   [rows] int64, first token id that is padding; None: there is none
    """

    logits: torch.Tensor
    first_id: int = 0
    limits: torch.Tensor | None = None
    edits: RowEdits | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, width)."""
        return self.logits.shape[0], self.logits.shape[1]

    def kernel_arguments(self) -> tuple[object, ...]:
        """What `row_limit` and `load_logits` need: limits, their stride, and the edits."""
        stride = 0 if self.limits is None else self.limits.stride(0)
        return self.limits, stride, self.edits


@triton.jit
def row_limit(limits_ptr, stride_limits, source, first_id, width, HAS_LIMITS: tl.constexpr):
    """Columns of a row that are tokens. source: its entry in the limits."""
    limit = width
    if HAS_LIMITS:
        limit = tl.minimum(tl.load(limits_ptr + source * stride_limits) - first_id, width).to(tl.int32)
    return limit


@triton.jit
def row_flag(edits, row, HAS_EDITS: tl.constexpr):
    """Say whether a row is edited."""
    flag = 0
    if HAS_EDITS:
        flag = tl.load(edits.flags + row)
    return flag


@triton.jit
def load_logits(logits_ptr, at, is_column, limit, row, flag, edits, HAS_EDITS: tl.constexpr):
    """Logits of a row in float32, -inf where there is nothing to choose.

    logits_ptr: of the row; at: columns, any shape; is_column: which of them exist; flag: of `row_flag`
    """
    x = tl.load(logits_ptr + at, mask=is_column, other=-float("inf")).to(tl.float32)
    if HAS_EDITS:
        if flag != 0:
            word_at = row * edits.num_words + (at >> 5)
            changed = tl.load(edits.changed + word_at, mask=is_column, other=0) >> (at & 31)
            is_changed = is_column & ((changed & 1) != 0)
            value = tl.load(edits.replaced + row * edits.width + at, mask=is_changed, other=0.0)
            allowed = tl.load(edits.allowed + word_at, mask=is_column, other=0) >> (at & 31)
            x = tl.where((allowed & 1) != 0, tl.where(is_changed, value, x), -float("inf"))
    # Apart from the load, which is wide because the width of rows is a round number.
    return tl.where(at < limit, x, -float("inf"))


@triton.jit
def temper(x, divisor):
    """Divide by a temperature, exactly as torch does: a token is either kept or not."""
    x = tl.minimum(x, _LARGEST)
    return tl.div_rn(x, tl.zeros_like(x) + divisor)


@triton.jit
def to_key(x):
    """Integers in the order of the floats; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def to_value(key):
    """Back from the key, which is its own inverse."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


def materialise(rows: LogitRows, row_index: torch.Tensor | None = None) -> torch.Tensor:
    """Write the rows out as the kernels see them, within LARGEST: [m, width] float32. row_index: [m] int64; None: all.

    For what is done by torch: whole sorted rows, and thresholds that several ranks look for.
    """
    num_rows, width = rows.shape
    if row_index is not None:
        num_rows = row_index.shape[0]
    out = torch.empty((num_rows, width), dtype=torch.float32, device=rows.logits.device)
    if num_rows:
        _materialise_kernel[(num_rows, triton.cdiv(width, 4096))](
            rows.logits, out if row_index is None else row_index, *rows.kernel_arguments(), out,
            rows.logits.stride(0), width, rows.first_id,
            HAS_INDEX=row_index is not None, HAS_LIMITS=rows.limits is not None, HAS_EDITS=rows.edits is not None,
            BLOCK=4096, num_warps=8,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["stride_limits", "first_id"])
def _materialise_kernel(
    logits_ptr, row_index_ptr, limits_ptr, stride_limits, edits, out_ptr, stride_logits, width, first_id,
    HAS_INDEX: tl.constexpr, HAS_LIMITS: tl.constexpr, HAS_EDITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = place
    if HAS_INDEX:
        row = tl.load(row_index_ptr + place)
    limit = row_limit(limits_ptr, stride_limits, row, first_id, width, HAS_LIMITS)
    flag = row_flag(edits, row, HAS_EDITS)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(
        logits_ptr + row * stride_logits, at, at < width, limit, row, flag, edits, HAS_EDITS=HAS_EDITS
    )
    tl.store(out_ptr + place * width + at, tl.minimum(x, _LARGEST), mask=at < width)
