"""The gated activations of an MLP. Called by: layers/mlp.py."""

from collections.abc import Callable

import torch

from ..kernels.ops import gated_gelu, gated_silu
from ..transformer_config import Activation
from .plain_module import PlainModule

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: gated_silu,
    Activation.GELU_TANH: gated_gelu,
}


class GatedActivation(PlainModule):
    """[num_tokens, 2 * columns] (gate, then up) -> [num_tokens, columns]."""

    def __init__(self, kind: Activation) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activate(x)
