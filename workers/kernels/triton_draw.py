"""The greedy choice and the plain draw at a temperature in two small Triton kernels, for CUDA.

Called by: decode_step.py, inside a CUDA graph. The reference is sampler.py over noise.py: the same Gumbel-max rule on
the same counter-based noise (Philox-4x32-10, Salmon et al., 2011), in float64, so the tokens are the same. The first
kernel finds the best token of each piece of a row, the second that of the row; of equal scores the lowest id wins.
"""

import torch
import triton
import triton.language as tl

_IDS = 2048
"""Token ids of one program of the first kernel."""


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

    logits:           [n, vocab_size], any float type, contiguous
    rows:             [n] int64, of the tensors below
    sample_positions: [n] int64, index of the token among its request's output tokens
    temperatures:     [all rows] float32; 0: greedy
    seeds, vocab_limits, last_tokens: [all rows] int64; the last is written; ids from the limit on are not drawn
    returns           [n] int64
    """
    num_rows, vocab_size = logits.shape
    num_pieces = triton.cdiv(vocab_size, _IDS)
    scores = torch.empty((num_rows, num_pieces), dtype=torch.float64, device=logits.device)
    ids = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _best_of_piece[(num_pieces, num_rows)](
        logits, rows, sample_positions, temperatures, seeds, vocab_limits, scores, ids, vocab_size, num_pieces,
        QUADS=_IDS // 4, num_warps=4,
    )  # fmt: skip
    _best_of_row[(num_rows,)](
        scores,
        ids,
        rows,
        last_tokens,
        tokens,
        num_pieces,
        PIECES=triton.next_power_of_2(num_pieces),
        num_warps=1,
    )
    return tokens


@triton.jit
def _gumbel(words):
    """Uniform in the middles of 2^24 cells, as noise.py."""
    uniform = ((words.to(tl.uint32, bitcast=True) >> 8).to(tl.float64) + 0.5) * 5.9604644775390625e-08
    return -tl.log(-tl.log(uniform))


@triton.jit
def _score(logits_ptr, offset, ids, limit, divisor, words, is_greedy):
    logits = tl.load(logits_ptr + offset + ids, mask=ids < limit, other=-float("inf")).to(tl.float32)
    scaled = tl.div_rn(logits, divisor).to(tl.float64)
    scores = tl.where(is_greedy, logits.to(tl.float64), scaled + _gumbel(words))
    return tl.where(ids < limit, scores, -float("inf"))


@triton.jit(do_not_specialize=["num_pieces"])
def _best_of_piece(
    logits_ptr,
    rows_ptr,
    sample_positions_ptr,
    temperatures_ptr,
    seeds_ptr,
    vocab_limits_ptr,
    scores_ptr,
    ids_ptr,
    vocab_size,
    num_pieces,
    QUADS: tl.constexpr,
):
    piece = tl.program_id(0)
    at = tl.program_id(1)
    row = tl.load(rows_ptr + at)
    temperature = tl.load(temperatures_ptr + row)
    seed = tl.load(seeds_ptr + row)
    limit = tl.minimum(tl.load(vocab_limits_ptr + row), vocab_size)
    position = tl.load(sample_positions_ptr + at).to(tl.int32)
    is_greedy = temperature == 0.0
    divisor = tl.zeros([QUADS], tl.float32) + tl.where(is_greedy, 1.0, temperature)
    quads = piece * QUADS + tl.arange(0, QUADS)
    zeros = tl.zeros([QUADS], tl.int32)
    # One evaluation gives the noise of four adjacent ids.
    w0, w1, w2, w3 = tl.philox(seed, position + zeros, quads, zeros, zeros)
    offset = at.to(tl.int64) * vocab_size
    ids = quads * 4
    s0 = _score(logits_ptr, offset, ids, limit, divisor, w0, is_greedy)
    s1 = _score(logits_ptr, offset, ids + 1, limit, divisor, w1, is_greedy)
    s2 = _score(logits_ptr, offset, ids + 2, limit, divisor, w2, is_greedy)
    s3 = _score(logits_ptr, offset, ids + 3, limit, divisor, w3, is_greedy)
    best = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), 0)
    none = 0x7FFFFFFF
    lowest = tl.minimum(
        tl.minimum(tl.where(s0 == best, ids, none), tl.where(s1 == best, ids + 1, none)),
        tl.minimum(tl.where(s2 == best, ids + 2, none), tl.where(s3 == best, ids + 3, none)),
    )
    place = at * num_pieces + piece
    tl.store(scores_ptr + place, best)
    tl.store(ids_ptr + place, tl.min(lowest, 0))


@triton.jit(do_not_specialize=["num_pieces"])
def _best_of_row(
    scores_ptr, ids_ptr, rows_ptr, last_tokens_ptr, tokens_ptr, num_pieces, PIECES: tl.constexpr
):
    at = tl.program_id(0)
    pieces = tl.arange(0, PIECES)
    is_piece = pieces < num_pieces
    scores = tl.load(scores_ptr + at * num_pieces + pieces, mask=is_piece, other=-float("inf"))
    ids = tl.load(ids_ptr + at * num_pieces + pieces, mask=is_piece, other=0x7FFFFFFF)
    best = tl.max(scores, 0)
    token = tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), 0).to(tl.int64)
    # A row whose logits are no numbers has no best token; padding may be such a row.
    token = tl.where(token == 0x7FFFFFFF, 0, token)
    tl.store(tokens_ptr + at, token)
    tl.store(last_tokens_ptr + tl.load(rows_ptr + at), token)
