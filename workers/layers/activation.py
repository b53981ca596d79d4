"""The gated activations of an MLP. Called by: layers/mlp.py."""

from collections.abc import Callable

import torch
from torch import nn

from ..kernels.gelu_and_mul import gelu_and_mul
from ..kernels.silu_and_mul import silu_and_mul
from ..transformer_config import Activation

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: silu_and_mul,
    Activation.GELU_TANH: gelu_and_mul,
}


class GatedActivation(nn.Module):
    """[num_tokens, 2 * columns] (gate, then up) -> [num_tokens, columns]."""

    def __init__(self, kind: Activation) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activate(x)
