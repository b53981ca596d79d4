"""The number formats of GGUF, back to float32. Pure numpy.

Called by: gguf_file.py. A format is a sequence of blocks of equal size, each with scales of its own; a row holds a
whole number of blocks. The layouts are those of ggml's block structures (ggml-common.h):

    Q4_0, Q5_0, Q8_0   32 numbers, one scale                      x = d * (q - half)
    Q4_1, Q5_1         32 numbers, scale and minimum              x = d * q + m
    Q4_K, Q5_K         256 numbers, 8 parts of 32                 x = d * scale * q - dmin * minimum
    Q6_K               256 numbers, 16 parts of 16                x = d * scale * (q - 32)
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
NUMBERS_AT_ONCE = 1 << 18
"""Bounds the memory for what stands between bytes and floats: it stays in the processor's cache."""


class GgufType(IntEnum):
    """Formats that are read, by their number in the file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """block_size: numbers in a block; num_bytes: of a block; decode: [blocks, num_bytes] -> [blocks, block_size]."""

    block_size: int
    num_bytes: int
    decode: Callable[[Bytes], Floats]


def dequantize(data: Bytes, kind: GgufType) -> Floats:
    """Decode whole blocks. data: [..., bytes]; returns [..., numbers]."""
    block = FORMATS[kind]
    blocks = data.reshape(-1, block.num_bytes)
    numbers = np.empty((len(blocks), block.block_size), dtype=np.float32)
    blocks_at_once = NUMBERS_AT_ONCE // block.block_size
    for start in range(0, len(blocks), blocks_at_once):
        part = slice(start, start + blocks_at_once)
        numbers[part] = block.decode(np.ascontiguousarray(blocks[part]))
    return numbers.reshape(*data.shape[:-1], data.shape[-1] // block.num_bytes * block.block_size)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4")


def _f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    scale = _f16(blocks[:, 0:2].copy())
    return scale * (_nibbles(blocks[:, 2:18]) - np.float32(8))


def _q4_1(blocks: Bytes) -> Floats:
    scale, minimum = _f16(blocks[:, 0:2].copy()), _f16(blocks[:, 2:4].copy())
    return scale * _nibbles(blocks[:, 4:20]) + minimum


def _q5_0(blocks: Bytes) -> Floats:
    scale = _f16(blocks[:, 0:2].copy())
    return scale * (_nibbles(blocks[:, 6:22]) + 16 * _bits(blocks[:, 2:6]) - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    scale, minimum = _f16(blocks[:, 0:2].copy()), _f16(blocks[:, 2:4].copy())
    return scale * (_nibbles(blocks[:, 8:24]) + 16 * _bits(blocks[:, 4:8])) + minimum


def _q8_0(blocks: Bytes) -> Floats:
    return _f16(blocks[:, 0:2].copy()) * blocks[:, 2:34].view(np.int8).astype(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    # [blocks, 4, 32] bytes; the low halves are one part of 32 numbers, the high ones the next.
    halves = blocks[:, 16:144].reshape(-1, 4, 32)
    numbers = np.stack((halves & 15, halves >> 4), axis=2).reshape(-1, 8, 32)
    return _scale_and_shift(blocks, numbers)


def _q5_k(blocks: Bytes) -> Floats:
    halves = blocks[:, 48:176].reshape(-1, 4, 32)
    numbers = np.stack((halves & 15, halves >> 4), axis=2).reshape(-1, 8, 32)
    # Bit j of byte i is the fifth bit of number i of part j.
    fifth = (blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1
    return _scale_and_shift(blocks, numbers | (fifth << 4))


def _q6_k(blocks: Bytes) -> Floats:
    # Two halves of 128 numbers: 64 bytes of low bits, 32 of high ones.
    low, high = blocks[:, 0:128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    nibbles = np.concatenate((low & 15, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    pairs = (high >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)) & 3
    numbers = (nibbles | (pairs << 4)).reshape(-1, 16, 16).astype(np.float32) - np.float32(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scales *= _f16(blocks[:, 208:210].copy())
    return (numbers * scales[:, :, None]).reshape(-1, 256)


def _nibbles(packed: Bytes) -> Floats:
    """[blocks, 16] bytes -> [blocks, 32]: the low halves, then the high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32)


def _bits(packed: Bytes) -> Floats:
    """[blocks, 4] bytes -> [blocks, 32] zeros and ones, the lowest bit first."""
    return np.unpackbits(packed, axis=1, bitorder="little").astype(np.float32)


def _scale_and_shift(blocks: Bytes, numbers: Bytes) -> Floats:
    """numbers: [blocks, 8, 32]. Eight scales and eight minima of 6 bits each share 12 bytes."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 6) << 4)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 6) << 4)), axis=1)
    scale = _f16(blocks[:, 0:2].copy()) * scales.astype(np.float32)
    minimum = _f16(blocks[:, 2:4].copy()) * minima.astype(np.float32)
    return (scale[:, :, None] * numbers.astype(np.float32) - minimum[:, :, None]).reshape(-1, 256)


FORMATS: dict[GgufType, BlockFormat] = {
    GgufType.F32: BlockFormat(block_size=1, num_bytes=4, decode=_f32),
    GgufType.F16: BlockFormat(block_size=1, num_bytes=2, decode=_f16),
    GgufType.BF16: BlockFormat(block_size=1, num_bytes=2, decode=_bf16),
    GgufType.Q4_0: BlockFormat(block_size=32, num_bytes=18, decode=_q4_0),
    GgufType.Q4_1: BlockFormat(block_size=32, num_bytes=20, decode=_q4_1),
    GgufType.Q5_0: BlockFormat(block_size=32, num_bytes=22, decode=_q5_0),
    GgufType.Q5_1: BlockFormat(block_size=32, num_bytes=24, decode=_q5_1),
    GgufType.Q8_0: BlockFormat(block_size=32, num_bytes=34, decode=_q8_0),
    GgufType.Q4_K: BlockFormat(block_size=256, num_bytes=144, decode=_q4_k),
    GgufType.Q5_K: BlockFormat(block_size=256, num_bytes=176, decode=_q5_k),
    GgufType.Q6_K: BlockFormat(block_size=256, num_bytes=210, decode=_q6_k),
}
