"""Root-mean-square norm. Plain torch, for every device.

Called by: layers/norm.py.
"""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divide each row by its root mean square, in float32, and scale it.

    x: [..., size]; weight: [size], same dtype. The scaling is done in that dtype, as the checkpoints were trained.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype)


def offset_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As `rms_norm`, but scale by 1 + weight, and in float32: what Gemma was trained with."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * (1.0 + weight.float())).to(x.dtype)
