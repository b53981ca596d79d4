"""Gated activation. Plain torch, for every device.

Called by: layers/activation.py.
"""

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of the last dimension times the second half.

    x: [num_tokens, 2 * size]; returns [num_tokens, size]. size may be 0.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
