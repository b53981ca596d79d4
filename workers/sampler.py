"""Sampler: logits -> one token for each row.

Called by: the model runner, on every rank. All ranks draw the same tokens, from bit-equal whole rows or each from its
part of the rows (`VocabShard`), without telling each other.

A row's token depends only on its own logits, parameters, tokens, seed and output position, never on its neighbours:
rows are only batched, never mixed. On a GPU Triton's kernels choose the token (fused_sampling.py), elsewhere plain
torch, from the same logits the same one. The order, all of it in float32:

    padding and grammar masks -> [raw log-probabilities] -> allowed tokens, bad words, bias, min_tokens, penalties
    -> greedy choice -> temperature -> min-p -> top-k -> top-p on what is left -> draw

Ties at a threshold all stay; a tie of the best goes to the lowest id. What no row of the batch asks for is skipped,
with the same results.
"""

from dataclasses import dataclass

import torch

from .config import LogprobsMode
from .kernels.ops import HAS_TRITON, is_fused
from .logit_processors import LARGEST, mask_grammar, mask_padding, process
from .logprobs import LogprobTensors, gather_logprobs
from .noise import MAX_GUMBEL, gumbel_noise, gumbel_rows
from .sampling_batch import SamplingBatch
from .sampling_filters import thresholds
from .vocab_columns import WHOLE, VocabColumns, best_of

if HAS_TRITON:
    from . import fused_sampling

_RAW = (LogprobsMode.RAW_LOGPROBS, LogprobsMode.RAW_LOGITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What one step chose.

    token_ids: [rows] int64
    logprobs:  one for each group of `SamplingBatch.logprobs`
    """

    token_ids: torch.Tensor
    logprobs: tuple[LogprobTensors, ...] = ()


def sample(logits: torch.Tensor, batch: SamplingBatch, columns: VocabColumns = WHOLE) -> Sampled:
    """Choose one token for each row.

    logits: [rows, width], the columns of `columns`; any float type, left as they are
    """
    if is_fused(logits):
        token_ids, tables = fused_sampling.sample(logits, batch, columns)
        return Sampled(token_ids=token_ids, logprobs=tables)
    has_padding = (
        batch.vocab_limits is not None and batch.min_vocab_limit < columns.first_id + logits.shape[1]
    )
    in_place = has_padding or batch.changes_logits or bool(batch.logprobs) or not batch.all_greedy
    # float32 before anything else: in bfloat16 a sum of probabilities means nothing.
    logits = logits.to(torch.float32, copy=in_place)
    if batch.vocab_limits is not None:
        mask_padding(logits, batch.vocab_limits, batch.min_vocab_limit, columns.first_id)
    if batch.grammar is not None:
        mask_grammar(logits, batch.grammar, columns)
    if in_place:
        # float16 reaches infinity, and infinity minus infinity is no number.
        logits.clamp_(max=LARGEST)
    raw = [logits.index_select(0, group.row_index) for group in batch.logprobs if batch.logprobs_mode in _RAW]
    process(logits, batch, columns)
    token_ids, kept = _choose(logits, batch, columns)
    if not batch.logprobs:
        return Sampled(token_ids=token_ids)
    if not raw:
        if kept is not None:
            # A greedy row has no filter: its threshold is -inf.
            logits.masked_fill_(logits < kept.unsqueeze(-1), -torch.inf)
        raw = [logits.index_select(0, group.row_index) for group in batch.logprobs]
    is_normalised = batch.logprobs_mode in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS)
    tables = tuple(
        gather_logprobs(
            rows,
            token_ids.index_select(0, group.row_index),
            group.num_top,
            columns=columns,
            is_normalised=is_normalised,
        )
        for rows, group in zip(raw, batch.logprobs, strict=True)
    )
    return Sampled(token_ids=token_ids, logprobs=tables)


def _choose(
    logits: torch.Tensor, batch: SamplingBatch, columns: VocabColumns
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the token of each row, [rows] int64; and the smallest tempered logit of each that the filters have left,
    [rows] float32, None where no row has a filter. logits are divided by the temperatures in place.
    """
    best_value, greedy = best_of(columns, logits)
    if batch.all_greedy:
        return greedy, None
    is_greedy = batch.temperatures == 0.0
    divisors = torch.where(is_greedy, 1.0, batch.temperatures)
    scaled = logits.div_(divisors.unsqueeze(-1))
    kept = None
    if batch.any_min_p or batch.any_filtered:
        kept = thresholds(scaled, batch, columns, best_value / divisors)
    drawn = _draw(scaled, greedy, best_value / divisors, kept, batch, columns)
    return torch.where(is_greedy, greedy, drawn), kept


def _draw(
    scaled: torch.Tensor,
    best: torch.Tensor,
    best_value: torch.Tensor,
    kept: torch.Tensor | None,
    batch: SamplingBatch,
    columns: VocabColumns,
) -> torch.Tensor:
    """Draw by the Gumbel-max rule: the largest of logit plus noise is a sample of the softmax.

    best, best_value: [rows] id and tempered logit of the likeliest token; kept: [rows] smallest logit that may be drawn
    """
    num_rows, width = scaled.shape
    # Noise of 24 bits is bounded, so a token wins only from within MAX_GUMBEL below what the likeliest token has
    # reached with its own noise. Leaving out the others changes nothing, and saves most of the noise.
    best_score = best_value.double() + gumbel_noise(batch.seeds, batch.positions, best)
    may_win = scaled >= (best_score - MAX_GUMBEL).unsqueeze(-1)
    may_win &= (batch.temperatures != 0.0).unsqueeze(-1)
    if kept is not None:
        may_win &= scaled >= kept.unsqueeze(-1)

    row_index, places = may_win.nonzero(as_tuple=True)
    if row_index.shape[0] > num_rows * width // 4:
        # One evaluation serves four adjacent ids: cheaper for all than for more than a quarter of them.
        noise = gumbel_rows(batch.seeds, batch.positions, width, first_id=columns.first_id)
        scores = torch.where(may_win, scaled.double() + noise, -torch.inf)
    else:
        noise = gumbel_noise(batch.seeds[row_index], batch.positions[row_index], places + columns.first_id)
        scores = torch.full_like(scaled, -torch.inf, dtype=torch.float64)
        scores[row_index, places] = scaled[row_index, places].double() + noise
    _, token_ids = best_of(columns, scores)
    return token_ids
