"""Gated activation with GELU. Plain torch, for every device.

Called by: layers/activation.py.
"""

import torch
import torch.nn.functional as F


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """GELU, in its tanh approximation, of the first half of the last dimension times the second half.

    x: [num_tokens, 2 * size]; returns [num_tokens, size]. size may be 0.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
