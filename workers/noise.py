"""Sampling noise: a counter function of (seed, position, token id, stream), never a generator's state.

Called by: the sampler. The same number on every device, in any batch, after any restart: that is what makes a
sampled token repeatable. Philox-4x32-10 (Salmon et al., 2011) in int64 arithmetic:

    key     = seed, low word and high word
    counter = (output position, token id // 4, stream, 0); the four words of the result serve four adjacent ids

The product of two 32-bit words wraps in int64, but its bits are those of the unsigned product, so masking after the
shift gives the right halves.

The logarithm is our own series (`log`): libraries differ in the last bit from device to device. It is made of
operations that IEEE 754 rounds in one way alone, one after the other, here and in kernels/triton_noise.py.
"""

import math

import torch

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
UNIFORM_BITS = 24

TARGET_STREAM = 0
"""The draw of an output token. Other draws at the same position must use other streams."""

MAX_GUMBEL = -math.log(-math.log1p(-(2.0 ** -(UNIFORM_BITS + 1)))) + 1e-9
"""No value that `gumbel_noise` returns is larger: about 17.33, and room for the error of `log`."""

EXPONENT_BITS = 52
MANTISSA_FROM = 0x3FE6000000000000
"""The bits of 0.6875 as float64: mantissas are taken between it and its double, around 1."""
LN_2 = math.log(2.0)
SERIES = tuple(2.0 / (2 * i + 1) for i in range(8))
"""log((1 + s) / (1 - s)) = 2 s + 2/3 s^3 + 2/5 s^5 + ..., cut where what is left out is below 1e-12 of it."""


def philox(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Philox-4x32-10. Four counter words and two key words, int64 in [0, 2^32), of shapes that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & WORD) ^ c1 ^ k0,
            p1 & WORD,
            ((p0 >> 32) & WORD) ^ c3 ^ k1,
            p0 & WORD,
        )
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, *, stream: int = TARGET_STREAM
) -> torch.Tensor:
    """One standard Gumbel number for each (seed, position, token id).

    seeds, positions, token_ids: [n] int64; seeds may be negative, the others not. Returns [n] float64.
    """
    words = torch.stack(_words(seeds, positions, token_ids >> 2, stream), dim=-1)
    return _to_gumbel(words.gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1))


def gumbel_rows(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_size: int,
    *,
    first_id: int = 0,
    stream: int = TARGET_STREAM,
) -> torch.Tensor:
    """The same for a range of token ids of a few rows, at a quarter of the cost for each.

    seeds, positions: [rows] int64; first_id: of the range, a multiple of 4. Returns [rows, vocab_size] float64.
    """
    assert first_id % 4 == 0, "four adjacent ids share one evaluation"
    quads = torch.arange(first_id // 4, first_id // 4 - (-vocab_size // 4), device=seeds.device)
    words = torch.stack(_words(seeds[:, None], positions[:, None], quads[None, :], stream), dim=-1)
    return _to_gumbel(words.flatten(1)[:, :vocab_size])


def _words(
    seeds: torch.Tensor, positions: torch.Tensor, quads: torch.Tensor, stream: int
) -> tuple[torch.Tensor, ...]:
    key = (seeds & WORD, (seeds >> 32) & WORD)
    counter = (positions, quads, torch.full_like(quads, stream), torch.zeros_like(quads))
    return philox(counter, key)


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of normal positive numbers, the same bits on every device. x: float64, any shape."""
    bits = x.view(torch.int64)
    exponent = (bits - MANTISSA_FROM) >> EXPONENT_BITS
    mantissa = (bits - (exponent << EXPONENT_BITS)).view(torch.float64)
    s = (mantissa - 1.0).div_(mantissa + 1.0)
    squared = s * s
    series = squared * SERIES[-1]
    for coefficient in SERIES[-2:0:-1]:
        series.add_(coefficient).mul_(squared)
    series.add_(SERIES[0]).mul_(s)
    return series.add_(exponent.double().mul_(LN_2))


def _to_gumbel(words: torch.Tensor) -> torch.Tensor:
    # The middle of one of 2^24 cells: never 0 and never 1. In float32 the last one would round to 1.
    uniform = (words >> (32 - UNIFORM_BITS)).double().add_(0.5).mul_(2.0**-UNIFORM_BITS)
    return log(log(uniform).neg_()).neg_()
