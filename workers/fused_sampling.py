"""One token for each row by Triton's kernels: what the torch path of sampler.py does, with the same result.

Called by: sampler.py, where the logits are on a GPU that has Triton. The logits are never written: masks, bias and
penalties are looked at as the kernels read (kernels/triton_edits.py). Whole rows are filtered and drawn without a
sort, in two reads of the logits; of parts of rows, each rank draws from its own, and the ranks compare scores.
"""

from dataclasses import replace

import torch

from .config import LogprobsMode
from .kernels.triton_draw import choose_tokens
from .kernels.triton_edits import edit
from .kernels.triton_filters import find_thresholds
from .kernels.triton_logprobs import MAX_PICKED, find_own, find_parts
from .kernels.triton_rows import LogitRows, materialise
from .logprobs import LogprobTensors, assemble, gather_logprobs
from .sampling_batch import SamplingBatch
from .sampling_filters import thresholds
from .vocab_columns import WHOLE, VocabColumns, best_of_all, max_of


def sample(
    logits: torch.Tensor, batch: SamplingBatch, columns: VocabColumns
) -> tuple[torch.Tensor, tuple[LogprobTensors, ...]]:
    """Return the token of each row, [rows] int64, and the log-probabilities of each group.

    logits: [rows, width], the columns of `columns`, any float type; left as they are
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    plain = LogitRows(logits=logits, first_id=columns.first_id, limits=batch.vocab_limits)
    edits, raw_edits = edit(plain, batch, columns)
    rows = replace(plain, edits=edits)
    token_ids, kept = choose(rows, batch, columns)
    if not batch.logprobs:
        return token_ids, ()
    is_raw = batch.logprobs_mode in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.RAW_LOGITS)
    if is_raw:
        rows, temperatures, kept = replace(plain, edits=raw_edits), None, None
    else:
        temperatures = batch.temperatures
    is_normalised = batch.logprobs_mode in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS)
    tables = tuple(
        gather(
            rows,
            group.row_index,
            token_ids.index_select(0, group.row_index),
            group.num_top,
            columns=columns,
            is_normalised=is_normalised,
            temperatures=temperatures,
            kept=kept,
        )
        for group in batch.logprobs
    )
    return token_ids, tables


def gather(
    rows: LogitRows,
    row_index: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: int,
    *,
    columns: VocabColumns = WHOLE,
    is_normalised: bool = True,
    temperatures: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> LogprobTensors:
    """Take the numbers of one token of some rows, and of the likeliest ones. See logprobs.gather_logprobs.

    row_index, token_ids: [m] int64; temperatures, kept: [rows], as the kernels take them (find_parts)
    """
    if num_top > min(MAX_PICKED, rows.shape[1] // 8):
        shown = materialise(rows, row_index)
        if temperatures is not None:
            divisors = temperatures.index_select(0, row_index)
            shown.div_(torch.where(divisors == 0.0, 1.0, divisors).unsqueeze(-1))
        if kept is not None:
            # A greedy row has no filter: its threshold is -inf.
            shown.masked_fill_(shown < kept.index_select(0, row_index).unsqueeze(-1), -torch.inf)
        return gather_logprobs(shown, token_ids, num_top, columns=columns, is_normalised=is_normalised)
    own = max_of(columns, find_own(rows, row_index, token_ids, temperatures=temperatures, kept=kept))
    parts = find_parts(rows, row_index, own, num_top, temperatures=temperatures, kept=kept)
    return assemble(token_ids, own, parts, num_top, columns=columns, is_normalised=is_normalised)


def choose(
    rows: LogitRows, batch: SamplingBatch, columns: VocabColumns
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the token of each row, [rows] int64; and the smallest tempered logit of each that the filters have left,
    [rows] float32, None where no row has a filter.
    """
    if batch.all_greedy:
        scores, token_ids = choose_tokens(rows)
        return best_of_all(columns, scores, token_ids)[1], None
    kept, group_best = None, None
    if batch.any_filtered or batch.any_min_p:
        if columns is WHOLE:
            kept, group_best = find_thresholds(
                rows,
                temperatures=batch.temperatures,
                top_ks=batch.top_ks,
                top_ps=batch.top_ps,
                min_ps=batch.min_ps,
                max_top_k=batch.max_top_k,
                has_open_nucleus=batch.has_open_nucleus,
            )
        else:
            # The ranks exchange their likeliest tokens on the way.
            scaled = temper(materialise(rows), batch)
            kept = thresholds(scaled, batch, columns, max_of(columns, scaled.amax(dim=-1)))
    scores, token_ids = choose_tokens(
        rows,
        temperatures=batch.temperatures,
        seeds=batch.seeds,
        positions=batch.positions,
        kept=kept,
        group_best=group_best,
    )
    return best_of_all(columns, scores, token_ids)[1], kept


def temper(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Divide by the temperatures in place, and return the same; greedy rows stay. logits: [rows, width] float32."""
    return logits.div_(torch.where(batch.temperatures == 0.0, 1.0, batch.temperatures).unsqueeze(-1))
