"""The noise of workers/noise.py inside Triton kernels: the same bits, and a quick estimate of it.

Called by: triton_draw.py. `gumbel` repeats the reference operation by operation in float64; a kernel that calls it
must be launched with `enable_fp_fusion=False`, for a fused multiply-add rounds once where the reference rounds twice.
`estimate_gumbel` is a float32 estimate that errs by less than ESTIMATE_ERROR, for a tenth of the time.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .. import noise

ESTIMATE_ERROR = 1e-5
"""The two differ by less: the error of GPUs' approximate logarithm, and some room."""

_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_MULTIPLIER_0 = tl.constexpr(noise.MULTIPLIERS[0])
_MULTIPLIER_1 = tl.constexpr(noise.MULTIPLIERS[1])
_WEYL_0 = tl.constexpr(noise.WEYL[0])
_WEYL_1 = tl.constexpr(noise.WEYL[1])
_NUM_ROUNDS = tl.constexpr(noise.NUM_ROUNDS)
_STREAM = tl.constexpr(noise.TARGET_STREAM)
_DROPPED_BITS = tl.constexpr(32 - noise.UNIFORM_BITS)
_NUM_CELLS = tl.constexpr(1 << noise.UNIFORM_BITS)
_CELL = tl.constexpr(2.0**-noise.UNIFORM_BITS)
_EXPONENT_BITS = tl.constexpr(noise.EXPONENT_BITS)
_MANTISSA_FROM = tl.constexpr(noise.MANTISSA_FROM)
_LN_2 = tl.constexpr(noise.LN_2)
_S0, _S1, _S2, _S3, _S4, _S5, _S6, _S7 = (tl.constexpr(value) for value in noise.SERIES)


@triton.jit
def philox(quad, position, seed):
    """Four words, uint32 of the shape of `quad`, for the token ids 4 * quad to 4 * quad + 3.

    quad: int32 tensor; position, seed: int64 scalars. See noise.philox.
    """
    key_0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c1 = quad.to(tl.uint32)
    zero = c1 ^ c1
    c0 = zero + position.to(tl.uint32)
    c2 = zero + _STREAM
    c3 = zero
    for _ in tl.static_range(_NUM_ROUNDS):
        # A product of two words, its halves taken apart: one instruction for both.
        p0 = c0.to(tl.uint64) * _MULTIPLIER_0
        p1 = c2.to(tl.uint64) * _MULTIPLIER_1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ key_0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ key_1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        key_0 = (key_0.to(tl.uint64) + _WEYL_0).to(tl.uint32)
        key_1 = (key_1.to(tl.uint64) + _WEYL_1).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _log(x):
    """See noise.log."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits - _MANTISSA_FROM) >> _EXPONENT_BITS
    mantissa = (bits - (exponent << _EXPONENT_BITS)).to(tl.float64, bitcast=True)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    squared = s * s
    series = squared * _S7
    series = (series + _S6) * squared
    series = (series + _S5) * squared
    series = (series + _S4) * squared
    series = (series + _S3) * squared
    series = (series + _S2) * squared
    series = (series + _S1) * squared
    series = (series + _S0) * s
    return series + exponent.to(tl.float64) * _LN_2


@triton.jit
def gumbel(word):
    """The noise of a word, in float64. See noise._to_gumbel."""
    uniform = ((word >> _DROPPED_BITS).to(tl.float64) + 0.5) * _CELL
    return -_log(-_log(uniform))


@triton.jit
def _estimate_log2(x):
    if _IS_COMPILED:
        # One instruction, for a dozen of `tl.log2`. The interpreter does not know it.
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
def estimate_gumbel(word):
    """About the noise of a word, in float32.

    Near 1 a uniform number is told apart from 1 by what is missing, which float32 holds exactly, and the logarithm
    of 1 - y is -y times a polynomial (interpolated at Chebyshev's points of [0, 1/2], relative error 2e-7).
    """
    cell = (word >> _DROPPED_BITS).to(tl.int32)
    missing = _NUM_CELLS - 1 - cell
    y = (tl.minimum(cell, missing).to(tl.float32) + 0.5) * _CELL
    near_one = 1.158614 * y - 1.036039
    near_one = near_one * y + 0.75458842
    near_one = near_one * y + 0.048358057
    near_one = near_one * y + 0.27047703
    near_one = near_one * y + 0.33200683
    near_one = near_one * y + 0.50003217
    near_one = near_one * y + 0.99999987
    # -log of the uniform number, which is exponential.
    exponential = tl.where(cell < missing, _estimate_log2(y) * -_LN_2, near_one * y)
    return _estimate_log2(exponential) * -_LN_2
