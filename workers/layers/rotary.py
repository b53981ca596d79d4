"""Rotary position embedding, plain and with the scalings of the Llama family.

Called by: the models: once per step for the angles, once per layer to rotate. Angles and rotation are float32.
"""

import math
from typing import Any, assert_never

import torch

from ..kernels.ops import is_fused
from ..transformer_config import RopeConfig, RopeType


class RotaryEmbedding:
    """Cosines and sines of all positions. Not a module: its table is derived, and no checkpoint holds it."""

    def __init__(self, *, head_size: int, rope: RopeConfig, max_positions: int) -> None:
        exponents = torch.arange(0, head_size, 2, dtype=torch.int64, device="cpu").float() / head_size
        inverse_frequencies = 1.0 / (rope.theta**exponents)
        self._inverse_frequencies = _scale(inverse_frequencies, rope)
        self._max_positions = max_positions
        self._table: torch.Tensor | None = None

    def place(self, device: torch.device) -> None:
        """Compute the table on `device`: [max_positions, 2, n] float32, with n as in `angles`."""
        positions = torch.arange(self._max_positions, device="cpu").float()
        angles = torch.outer(positions, self._inverse_frequencies)
        factors = angles.cos(), angles.sin()
        if not is_fused(torch.empty(0, device=device)):
            factors = widen_angles(*factors)
        self._table = torch.stack(factors, dim=1).to(device)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [num_tokens] -> cosines and sines, each [num_tokens, 1, n].

        n: half the head size where kernels take them (`is_fused`); elsewhere they are as `rotate` wants them
        """
        assert self._table is not None, "place() was not called"
        cos, sin = self._table.index_select(0, positions).split(1, dim=1)
        return cos, sin


def widen_angles(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make `rotate`'s factors for whole heads of cosines and sines: [..., head_size / 2] -> [..., head_size]."""
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + head_size / 2) by its angle.

    x: [num_tokens, num_heads, head_size]; cos, sin: as `widen_angles` makes them; returns the same shape and dtype
    """
    wide = x.float()
    # Each number beside the other one of its pair.
    other = wide.roll(wide.shape[-1] // 2, -1)
    return (wide * cos).addcmul_(other, sin).to(x.dtype)


def _scale(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    match rope.rope_type:
        case RopeType.DEFAULT:
            return frequencies
        case RopeType.LINEAR:
            return frequencies / rope.parameters["factor"]
        case RopeType.LLAMA3:
            return _scale_llama3(frequencies, rope.parameters)
        case RopeType.DIVIDED:
            return frequencies / torch.tensor(rope.parameters["divisors"], device="cpu")
        case _:
            assert_never(rope.rope_type)


def _scale_llama3(frequencies: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Slow angles are divided by the factor, fast ones stay, and those between are blended."""
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained_len = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > trained_len / low, frequencies / factor, frequencies)
    blend = (trained_len / wavelengths - low) / (high - low)
    blended = (1 - blend) * scaled / factor + blend * scaled
    is_between = ~(wavelengths < trained_len / high) & ~(wavelengths > trained_len / low)
    return torch.where(is_between, blended, scaled)
