"""Repetition, frequency and presence penalties in one Triton kernel, for CUDA.

Called by: workers/sampler.py. The reference is `penalise` of workers/logit_processors.py, with the same roundings in
the same places: the kernel is launched with `enable_fp_fusion=False`. It reads logits and counts once, and writes only
the logits that change.
"""

import torch
import triton
import triton.language as tl

from ..logit_processors import LARGEST
from ..sampling_batch import Penalties

BLOCK = 4096

_LARGEST = tl.constexpr(LARGEST)


def penalise(logits: torch.Tensor, penalties: Penalties, first_id: int) -> None:
    """See logit_processors.penalise. logits: [rows, width] float32, changed in place."""
    num_rows = penalties.row_index.shape[0]
    counts, in_prompt = penalties.counts, penalties.in_prompt.view(torch.uint8)
    # A rank without columns has one of an id that no token has.
    width = min(logits.shape[1], counts.shape[1] - first_id)
    if num_rows == 0 or width <= 0:
        return
    _penalise_kernel[(triton.cdiv(width, BLOCK), num_rows)](
        logits, penalties.row_index, penalties.slots, penalties.repetition, penalties.frequency, penalties.presence,
        in_prompt, counts, logits.stride(0), counts.stride(0), penalties.repetition.stride(0), width, first_id,
        BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_values", "first_id"])
def _penalise_kernel(
    logits_ptr, row_index_ptr, slots_ptr, repetition_ptr, frequency_ptr, presence_ptr, in_prompt_ptr, counts_ptr,
    stride_logits, stride_counts, stride_values, width, first_id,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(1)
    row = tl.load(row_index_ptr + place)
    slot = tl.load(slots_ptr + place)
    repetition = tl.load(repetition_ptr + place * stride_values)
    frequency = tl.load(frequency_ptr + place * stride_values)
    presence = tl.load(presence_ptr + place * stride_values)
    mask = at < width
    in_prompt = tl.load(in_prompt_ptr + slot * stride_counts + first_id + at, mask=mask, other=0) != 0
    count = tl.load(counts_ptr + slot * stride_counts + first_id + at, mask=mask, other=0)
    old = tl.load(logits_ptr + row * stride_logits + at, mask=mask, other=0.0)
    in_output = count > 0
    divided = tl.div_rn(old, tl.zeros_like(old) + repetition)
    repeated = tl.where(old > 0, divided, old * repetition)
    new = tl.where(in_prompt | in_output, repeated, old)
    new = new - frequency * count.to(tl.float32) - presence * in_output.to(tl.float32)
    new = tl.minimum(tl.maximum(new, -_LARGEST), _LARGEST)
    is_changed = mask & (new != old) & (old != -float("inf"))
    tl.store(logits_ptr + row * stride_logits + at, new, mask=is_changed)
