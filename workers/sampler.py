"""Sampler: logits -> one token for each row.

Called by: the model runner, on every rank. All ranks hold bit-equal logits and draw the same tokens.

A row's token depends only on its own logits, parameters, seed and output position, never on its neighbours: rows
are only batched, never mixed. Order: grammar mask, min_tokens mask, greedy choice, temperature, top-k, top-p on what
top-k left, draw. Ties at a threshold all stay; a tie of the best goes to the lowest id.
"""

from dataclasses import dataclass

import torch

from .noise import MAX_GUMBEL, gumbel_noise, gumbel_rows

TOP_P_TOLERANCE = 1e-6
"""A nucleus whose mass equals top_p takes no further token, however float32 has rounded the mass."""
FIRST_SORTED = 256
"""Likeliest tokens looked at first for a nucleus. Nearly always enough, and sorting the vocabulary is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """The rows that sample in one step. Tensors on the logits' device.

    temperatures:      [rows] float32; 0: greedy
    top_ks:            [rows] int64; 0: off
    top_ps:            [rows] float32; 1: off
    seeds, positions:  [rows] int64; position: index of the token among its request's output tokens
    grammar_row_index: [m] int64, rows that have a grammar; grammar_allowed: [m, vocab_size] bool, what it allows
    banned_row_index, banned_token_ids: [n] int64, the pairs that min_tokens holds back
    all_greedy, any_filtered: known on the host, so that nothing waits for the device
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    banned_row_index: torch.Tensor | None
    banned_token_ids: torch.Tensor | None
    all_greedy: bool
    any_filtered: bool
    grammar_row_index: torch.Tensor | None = None
    grammar_allowed: torch.Tensor | None = None


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Choose one token for each row.

    logits: [rows, vocab_size], any float type, left as they are; returns [rows] int64
    """
    # float32 before anything else: in bfloat16 a sum of probabilities means nothing.
    logits = logits.float()
    if batch.grammar_row_index is not None and batch.grammar_allowed is not None:
        constrained = logits[batch.grammar_row_index].masked_fill(~batch.grammar_allowed, -torch.inf)
        logits = logits.index_copy(0, batch.grammar_row_index, constrained)
    if batch.banned_row_index is not None and batch.banned_token_ids is not None:
        logits = logits.index_put(
            (batch.banned_row_index, batch.banned_token_ids), logits.new_tensor(-torch.inf)
        )
    greedy = first_argmax(logits)
    if batch.all_greedy:
        return greedy
    is_greedy = batch.temperatures == 0.0
    scaled = logits / torch.where(is_greedy, 1.0, batch.temperatures).unsqueeze(-1)
    drawn = _draw(scaled, greedy, batch)
    return torch.where(is_greedy, greedy, drawn)


def first_argmax(x: torch.Tensor) -> torch.Tensor:
    """Index of the largest value of each row, the lowest index on ties. x: [rows, n]; returns [rows] int64."""
    if x.device.type == "cpu":
        return x.argmax(dim=-1)
    # argmax leaves open which of several equal values it returns on a GPU.
    index = torch.arange(x.shape[-1], device=x.device)
    is_best = x == x.amax(dim=-1, keepdim=True)
    return torch.where(is_best, index, x.shape[-1] - 1).amin(dim=-1)


def _draw(scaled: torch.Tensor, best: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Draw by the Gumbel-max rule: the largest of logit plus noise is a sample of the softmax."""
    num_rows, vocab_size = scaled.shape
    # Noise of 24 bits is bounded, so a token wins only from within MAX_GUMBEL below what the likeliest token has
    # reached with its own noise. Leaving out the others changes nothing, and saves most of the noise.
    best_value = scaled.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    best_score = best_value.double() + gumbel_noise(batch.seeds, batch.positions, best)
    may_win = scaled >= (best_score - MAX_GUMBEL).unsqueeze(-1)
    may_win &= (batch.temperatures != 0.0).unsqueeze(-1)
    if batch.any_filtered:
        may_win &= scaled >= _thresholds(scaled, batch).unsqueeze(-1)

    row_index, token_ids = may_win.nonzero(as_tuple=True)
    if row_index.shape[0] > num_rows * vocab_size // 4:
        # One evaluation serves four adjacent ids: cheaper for all than for more than a quarter of them.
        noise = gumbel_rows(batch.seeds, batch.positions, vocab_size)
        scores = torch.where(may_win, scaled.double() + noise, -torch.inf)
    else:
        noise = gumbel_noise(batch.seeds[row_index], batch.positions[row_index], token_ids)
        scores = torch.full_like(scaled, -torch.inf, dtype=torch.float64)
        scores[row_index, token_ids] = scaled[row_index, token_ids].double() + noise
    return first_argmax(scores)


def _thresholds(scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Smallest value of each row that top-k and then top-p leave: [rows] float32.

    Looks at the likeliest tokens only, and at more of them until every row's threshold lies among them.
    """
    vocab_size = scaled.shape[-1]
    top_ks = torch.where((batch.top_ks <= 0) | (batch.top_ks > vocab_size), vocab_size, batch.top_ks)
    is_all = top_ks == vocab_size
    largest_k = int(torch.where(is_all, 0, top_ks).max())
    total_mass = _mass(scaled, scaled.amax(dim=-1, keepdim=True)).sum(dim=-1)
    needs_nucleus = batch.top_ps < 1.0
    num_sorted = min(vocab_size, max(FIRST_SORTED, largest_k))
    while True:
        # [rows, num_sorted], largest first
        if num_sorted < vocab_size:
            values = scaled.topk(num_sorted, dim=-1).values
        else:
            values = scaled.sort(dim=-1, descending=True).values
        kth = values.gather(-1, (top_ks.clamp(max=num_sorted) - 1).unsqueeze(-1))
        kth = torch.where(is_all.unsqueeze(-1), -torch.inf, kth)
        mass = _mass(values, values[:, :1])
        # After top-k the survivors alone make up the whole. Ties of the k-th value survive, wherever they are.
        kept = torch.where(values >= kth, mass, 0.0)
        tied = (scaled == kth).sum(dim=-1) - (values == kth).sum(dim=-1)
        tied_mass = tied * _mass(kth, values[:, :1]).squeeze(-1)
        whole = torch.where(is_all, total_mass, kept.sum(dim=-1) + tied_mass)
        wanted = (batch.top_ps.double() - TOP_P_TOLERANCE) * whole
        # A token belongs to the nucleus while those before it have not reached the mass wanted.
        before = kept.cumsum(dim=-1) - kept
        in_nucleus = (before < wanted.unsqueeze(-1)) & (values >= kth)
        in_nucleus[:, 0] = True
        last = in_nucleus.sum(dim=-1, keepdim=True) - 1
        is_open = needs_nucleus & (last.squeeze(-1) == num_sorted - 1)
        if num_sorted == vocab_size or not bool(is_open.any()):
            break
        # To find a large part of a row is slower than to sort it.
        num_sorted = num_sorted * 8 if num_sorted * 32 < vocab_size else vocab_size
    nucleus = values.gather(-1, last).squeeze(-1)
    return torch.where(needs_nucleus, nucleus, kth.squeeze(-1))


def _mass(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities in float64, so that their sum hardly depends on its order."""
    return (values - largest).double().exp()
