"""min-p, top-k and top-p: the smallest logit of each row that may be drawn.

Called by: sampler.py. A filter never needs more than one number of a row, because equal logits stay or go together.
"""

import torch
import torch.nn.functional as F

from .sampling_batch import SamplingBatch
from .vocab_columns import WHOLE, VocabColumns, sum_of

TOP_P_TOLERANCE = 1e-6
"""A nucleus whose mass equals top_p takes no further token, however float32 has rounded the mass."""
FIRST_SORTED = 256
"""Likeliest tokens looked at first for a nucleus. Nearly always enough, and sorting the vocabulary is slow."""


def thresholds(
    scaled: torch.Tensor, batch: SamplingBatch, columns: VocabColumns, best_value: torch.Tensor
) -> torch.Tensor:
    """Smallest value of each row that the filters leave: [rows] float32; -inf for rows without one.

    scaled:     [rows, width] tempered logits
    best_value: [rows] the largest of each whole row; it always stays
    Where the columns are a part, no row may have a nucleus without top-k (`has_open_nucleus`).
    """
    floor = torch.full_like(best_value, -torch.inf)
    is_random = batch.temperatures != 0.0
    if batch.any_min_p:
        has_min_p = is_random & (batch.min_ps > 0.0)
        # In float32 a sum may round up past the largest value itself.
        by_min_p = torch.minimum(best_value + batch.min_ps.log(), best_value)
        floor = torch.where(has_min_p, by_min_p, floor)
    if not batch.any_filtered:
        return floor
    return _top_k_top_p(scaled, batch, columns, best_value, floor, is_random)


def _top_k_top_p(
    scaled: torch.Tensor,
    batch: SamplingBatch,
    columns: VocabColumns,
    best_value: torch.Tensor,
    floor: torch.Tensor,
    is_random: torch.Tensor,
) -> torch.Tensor:
    """Look at the likeliest tokens only, and at more of them until every row's threshold lies among them."""
    width = scaled.shape[-1]
    has_top_k = is_random & (batch.top_ks > 0)
    needs_nucleus = is_random & (batch.top_ps < 1.0)
    num_sorted = max(batch.max_top_k, FIRST_SORTED if batch.has_open_nucleus else 1)
    largest = best_value.unsqueeze(-1)
    whole: torch.Tensor | None = None
    while True:
        # [rows, num_sorted or more], largest first; of the whole row
        values = _largest(scaled, num_sorted, columns)
        # Bounds of top_k lie within the whole vocabulary, and that many values have been gathered.
        kth = values.gather(-1, (batch.top_ks.clamp(1, values.shape[-1]) - 1).unsqueeze(-1)).squeeze(-1)
        floor = torch.where(has_top_k, torch.maximum(floor, kth), floor)
        if whole is None:
            # After top-k the survivors alone make up the whole. Ties of the k-th value survive, wherever they are.
            survivors = torch.where(scaled >= floor.unsqueeze(-1), _mass(scaled, largest), 0.0)
            whole = sum_of(columns, survivors.sum(dim=-1))
        kept = torch.where(values >= floor.unsqueeze(-1), _mass(values, largest), 0.0)
        wanted = (batch.top_ps.double() - TOP_P_TOLERANCE) * whole
        # A token belongs to the nucleus while those before it have not reached the mass wanted.
        before = kept.cumsum(dim=-1) - kept
        in_nucleus = (before < wanted.unsqueeze(-1)) & (values >= floor.unsqueeze(-1))
        in_nucleus[:, 0] = True
        last = in_nucleus.sum(dim=-1, keepdim=True) - 1
        edge = values.gather(-1, last).squeeze(-1)
        if not batch.has_open_nucleus or num_sorted >= width:
            break
        is_open = needs_nucleus & (last.squeeze(-1) == values.shape[-1] - 1) & (edge > floor)
        if not bool(is_open.any()):
            break
        # To find a large part of a row is slower than to sort it.
        num_sorted = num_sorted * 8 if num_sorted * 32 < width else width
    return torch.where(needs_nucleus, torch.maximum(edge, floor), floor)


def _largest(scaled: torch.Tensor, count: int, columns: VocabColumns) -> torch.Tensor:
    """The largest values of the whole rows, sorted: at least `count` of them where there are so many."""
    width = scaled.shape[-1]
    if count < width:
        values = scaled.topk(count, dim=-1).values
    else:
        values = scaled.sort(dim=-1, descending=True).values
    if columns is WHOLE:
        return values
    # The ranks' ranges differ in width, and each must bring the same amount.
    values = F.pad(values, (0, count - values.shape[-1]), value=-torch.inf)
    return columns.gather(values).sort(dim=-1, descending=True).values


def _mass(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities in float64, so that their sum hardly depends on its order."""
    return (values.double() - largest.double()).exp()
