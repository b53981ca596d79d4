"""Root-mean-square norm. Plain torch, for every device.

Called by: layers/norm.py.
"""

from functools import cache

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divide each row by its root mean square, in float32, and scale it.

    x: [..., size]; weight: [size], same dtype. The scaling is done in that dtype, as the checkpoints were trained.
    """
    if x.dtype == torch.float32:
        return _normalize(x, epsilon).mul_(weight)
    return weight * _normalize(x.float(), epsilon).to(x.dtype)


def offset_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As `rms_norm`, but scale by 1 + weight, and in float32: what Gemma was trained with."""
    return _normalize(x.float(), epsilon).mul_(1.0 + weight.float()).to(x.dtype)


def _normalize(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x: [..., size] float32; returns a new tensor."""
    if x.device.type != "cpu":
        return F.rms_norm(x, x.shape[-1:], eps=epsilon)
    # Torch has no kernel for it there: its function calls nine, of which four go through all of x; here two do.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(_scalar(epsilon), length, length, value=1.0 / x.shape[-1]).rsqrt_()


@cache
def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, device="cpu")
