"""Weights on CPU, stored as its matrix products like to read them.

Called by: kernels/linear.py. A product of few rows, as in decode, is bound by how fast its weight comes from memory:
both layouts hold it in blocks that are read in one run.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch


class PackedWeight(ABC):
    """A weight [outputs, inputs] that only `product` can read. nbytes: of its memory."""

    nbytes: int

    @abstractmethod
    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [rows, inputs], bias [outputs], both of the weight's dtype -> [rows, outputs]."""
        ...


class OneDnnWeight(PackedWeight):
    """oneDNN's blocked layout, in the weight's own dtype: float32, or bfloat16 where the CPU multiplies it."""

    PACKED_FOR_ROWS: ClassVar[int] = 8
    """The layout that oneDNN chooses for so many rows is as fast as any other for 1 to 512 rows. For 1 it is not."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(weight, self.PACKED_FOR_ROWS)
        self.nbytes = weight.nbytes

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._blocks, bias, "none", [], "")
        return result


class HalfWeight(PackedWeight):
    """FBGEMM's blocks of float16, multiplied and summed in float32: of a CPU that multiplies no 16-bit numbers.

    For weights of two bytes, which torch multiplies number by number there. With the shapes of a 135M model and AVX2:
    about as fast with 1 row, 3 to 6 times as fast with 8, 6 to 9 times with 128. The layout is exact for float16, and
    for bfloat16 from 2^-17 to 65504; below, a weight is off by 2^-25 at most, which no sum with a larger one sees
    once it is rounded to bfloat16.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        # The blocks: a TorchScript object.
        self._blocks = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        self.nbytes = weight.nbytes

    @staticmethod
    def can_hold(weight: torch.Tensor) -> bool:
        """Say whether no number of `weight` is too large, and none is not a number."""
        return weight.abs().amax().item() <= torch.finfo(torch.float16).max

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self._blocks)
        return (wide if bias is None else wide.add_(bias)).to(x.dtype)
