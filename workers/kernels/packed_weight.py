"""Weights on CPU, stored as its matrix products like to read them.

Made by: kernels/linear.py. Called by: layers/linear.py and layers/embedding.py. A product of few rows, as in decode, is
bound by how fast its weight comes from memory: both layouts hold it in blocks that are read in one run.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch

_LARGEST_EXPONENT = 16
_SMALLEST_NORMAL = 2.0**-14
"""Of float16."""
_ROWS_AT_ONCE = 1024


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
    """FBGEMM's blocks of float16 times one power of two, multiplied and summed in float32.

    For weights of two bytes where the CPU multiplies no such numbers (torch would, one by one), and for float32 ones
    that come from a checkpoint of such: half as many bytes come from memory. With the shapes of a 135M model, AVX2 and
    two cores, a layer's products take 0.47 of oneDNN's time for 8 rows, 0.8 for 32, and as long for 1024.

    The power of two makes the largest number as large as float16 takes it, because float16 has fewer bits for those
    below 2^-14. Of bfloat16 that leaves what is below 2^-32 of the largest: off by 2^-40 of it at most.
    """

    # Without the overload's own call, which looks for what only a tracer passes: a dozen calls in Python.
    _multiply = staticmethod(torch.ops.quantized.linear_dynamic_fp16.default._op)

    MAX_EXPONENT: ClassVar[int] = 100
    """Of the power of two: it and its inverse are numbers of full precision."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight: as `takes` wants it."""
        scaled = weight.float() * _half_scale(weight)
        # The blocks: a TorchScript object.
        self._blocks = torch.ops.quantized.linear_prepack_fp16(scaled, None)
        # A tensor: a number is made one, of another dtype, and converted for each product.
        self._inverse_scale = torch.tensor(1.0 / _half_scale(weight), device="cpu")
        self.nbytes = 2 * weight.numel()

    @classmethod
    def takes(cls, weight: torch.Tensor) -> bool:
        """Say whether the blocks hold all numbers of `weight`, of float32 as exactly as sums in float32 can tell."""
        if not weight.isfinite().all():
            return False
        if weight.itemsize == 2:
            return True
        scale = _half_scale(weight)
        # Part by part: weights that are no halves are told by the first rows, and a large one has no copy as a whole.
        return all(_are_halves(rows * scale) for rows in weight.split(_ROWS_AT_ONCE))

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # Exact, and cheaper here than on the outputs, which most weights have more of.
        scaled = x.float().mul(self._inverse_scale)
        # torch would ask the blocks for `__torch_function__`, and a TorchScript object that has no such attribute
        # throws: 15 us a call.
        with torch._C.DisableTorchFunctionSubclass():
            wide: torch.Tensor = self._multiply(scaled, self._blocks)
        return (wide if bias is None else wide.add_(bias)).to(x.dtype)


def _half_scale(weight: torch.Tensor) -> float:
    """Return the power of two that brings the largest of finite numbers just below 2^16."""
    exponent = _LARGEST_EXPONENT - math.frexp(weight.abs().amax().item())[1]
    return 2.0 ** max(-HalfWeight.MAX_EXPONENT, min(exponent, HalfWeight.MAX_EXPONENT))


def _are_halves(rows: torch.Tensor) -> bool:
    """Say whether float16 holds each number of `rows`, or one that its row cannot tell from it.

    Small numbers are off by 2^-25 at most. Beside one of 1 or more that is half a unit in the last place of float32.
    """
    is_exact = rows.half().float() == rows
    sizes = rows.abs()
    is_lost_in_sum = (sizes < _SMALLEST_NORMAL) & (sizes.amax(dim=1, keepdim=True) >= 1.0)
    return bool((is_exact | is_lost_in_sum).all())
