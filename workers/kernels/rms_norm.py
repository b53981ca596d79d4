"""Root-mean-square norm. Plain torch, for every device.

Called by: layers/norm.py.
"""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divide each row by its root mean square, in float32, and scale it.

    x: [..., size]; weight: [size], same dtype. The scaling is done in that dtype, as the checkpoints were trained.
    """
    if x.dtype == torch.float32:
        # The same, in one call.
        return F.rms_norm(x, weight.shape, weight, epsilon)
    wide = F.rms_norm(x.float(), weight.shape, eps=epsilon)
    return weight * wide.to(x.dtype)


def offset_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As `rms_norm`, but scale by 1 + weight, and in float32: what Gemma was trained with."""
    return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), epsilon).to(x.dtype)
