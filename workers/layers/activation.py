"""The gated activation of an MLP. Called by: the models."""

import torch
from torch import nn

from ..kernels.silu_and_mul import silu_and_mul


class SiluAndMul(nn.Module):
    """[num_tokens, 2 * columns] (gate, then up) -> [num_tokens, columns]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)
