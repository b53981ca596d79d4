"""RMSNorm with the residual that runs beside it. Called by: the models. The same on every rank."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import nn

from ..kernels.ops import add_rms_norm, is_small_product_of_norm, small_product_of_norm
from ..kernels.rms_norm import offset_rms_norm, rms_norm
from .linear import ColumnParallelLinear
from .plain_module import PlainModule
from .shard import TensorShard, whole_tensor


class RMSNorm(PlainModule):
    """Normalise the last dimension, of `size`."""

    is_offset: ClassVar[bool] = False
    """Scales by one plus the weight."""

    def __init__(self, size: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `residual` to `x`, and return the normalised sum and the sum. x: also as `leaves_parts` has it."""
        return add_rms_norm(x, residual, self.weight, self.epsilon, is_offset=self.is_offset)

    def project(
        self, x: torch.Tensor, residual: torch.Tensor | None, projection: ColumnParallelLinear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the projection of the normalised sum, and the sum; one kernel where there are few rows."""
        if x.dim() == 2 and is_small_product_of_norm(x, projection.weight):
            return small_product_of_norm(
                x,
                residual,
                self.weight,
                self.epsilon,
                projection.weight,
                projection.bias,
                is_offset=self.is_offset,
            )
        normalized, total = self(x, residual)
        return projection(normalized), total

    def widen(self, dtype: torch.dtype) -> None:
        """Keep the loaded weight as `dtype`, that of what it scales."""
        self.weight = nn.Parameter(self.weight.to(dtype), requires_grad=False)

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same."""
        norm = offset_rms_norm if self.is_offset else rms_norm
        return norm(x, self.weight, self.epsilon)

    def shards(self, name: str) -> Iterator[TensorShard]:
        yield whole_tensor(f"{name}.weight", self.weight)


class OffsetRMSNorm(RMSNorm):
    """Scales by one plus the weight, as Gemma does."""

    is_offset = True
