"""The gated activations of an MLP. Called by: layers/mlp.py."""

from collections.abc import Callable

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..kernels.gelu_and_mul import gelu_and_mul
from ..kernels.silu_and_mul import silu_and_mul

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_and_mul,
    "gelu_pytorch_tanh": gelu_and_mul,
}
"""By config.json's name."""


class GatedActivation(nn.Module):
    """[num_tokens, 2 * columns] (gate, then up) -> [num_tokens, columns].

    Raises UnsupportedModelError for a name that is not in ACTIVATIONS.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        if name not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"the activation {name!r} is not supported; supported: {', '.join(sorted(ACTIVATIONS))}"
            )
        self.activate = ACTIVATIONS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activate(x)
