"""One token for each row by Triton's kernels: what the torch path of sampler.py does, with the same result.

Called by: sampler.py, where the logits are on a GPU that has Triton. Whole rows are filtered and drawn without a sort,
in two reads of the logits; of parts of rows, each rank draws from its own, and the ranks compare scores.
"""

import torch

from .kernels.triton_draw import choose_tokens
from .kernels.triton_filters import find_thresholds
from .logit_processors import LARGEST
from .sampling_batch import SamplingBatch
from .sampling_filters import thresholds
from .vocab_columns import WHOLE, VocabColumns, best_of_all, max_of


def choose(
    logits: torch.Tensor, batch: SamplingBatch, columns: VocabColumns
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the token of each row, [rows] int64; and the smallest tempered logit of each that the filters have left,
    [rows] float32, None where no row has a filter.

    logits: [rows, width], the columns of `columns`, any float type; left as they are
    """
    if batch.all_greedy:
        scores, token_ids = choose_tokens(logits, first_id=columns.first_id)
        return best_of_all(columns, scores, token_ids)[1], None
    kept, group_best = None, None
    if batch.any_filtered or batch.any_min_p:
        if columns is WHOLE:
            kept, group_best = find_thresholds(
                logits,
                temperatures=batch.temperatures,
                top_ks=batch.top_ks,
                top_ps=batch.top_ps,
                min_ps=batch.min_ps,
                max_top_k=batch.max_top_k,
                has_open_nucleus=batch.has_open_nucleus,
            )
        else:
            # The ranks exchange their likeliest tokens on the way.
            scaled = temper(logits.to(torch.float32, copy=True).clamp_(max=LARGEST), batch)
            kept = thresholds(scaled, batch, columns, max_of(columns, scaled.amax(dim=-1)))
    scores, token_ids = choose_tokens(
        logits,
        temperatures=batch.temperatures,
        seeds=batch.seeds,
        positions=batch.positions,
        kept=kept,
        group_best=group_best,
        first_id=columns.first_id,
    )
    return best_of_all(columns, scores, token_ids)[1], kept


def temper(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Divide by the temperatures in place, and return the same; greedy rows stay. logits: [rows, width] float32."""
    return logits.div_(torch.where(batch.temperatures == 0.0, 1.0, batch.temperatures).unsqueeze(-1))
