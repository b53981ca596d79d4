"""RMSNorm with the residual that runs beside it. Called by: the models. The same on every rank."""

from collections.abc import Iterator

import torch
from torch import nn

from ..kernels.rms_norm import rms_norm
from .shard import TensorShard, whole_tensor


class RMSNorm(nn.Module):
    """Normalise hidden states of [num_tokens, size]."""

    def __init__(self, size: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `residual` to `x`, and return the normalised sum and the sum."""
        if residual is not None:
            x = x + residual
        return rms_norm(x, self.weight, self.epsilon), x

    def shards(self, name: str) -> Iterator[TensorShard]:
        yield whole_tensor(f"{name}.weight", self.weight)
