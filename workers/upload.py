"""Integers of a step on their way to the device: side by side in one buffer, in one copy, without waiting.

Called by: the model runner and the rows on the device, once or twice a step. On a GPU the buffer is pinned; torch gives
it out again only when the copy is done, so nobody has to keep it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[torch.Tensor]:
    """Copy int64 arrays of any shape to `device`; returns tensors of the same shapes, views of one buffer."""
    total = sum(array.size for array in arrays)
    buffer = pinned_ints(total, device)
    host, start = buffer.numpy(), 0
    for array in arrays:
        host[start : start + array.size] = array.reshape(-1)
        start += array.size
    on_device = buffer.to(device, non_blocking=True)
    parts = on_device.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def upload_one(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy one array of any dtype to `device`; on a GPU without waiting for what it computes."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def pinned_ints(size: int, device: torch.device) -> torch.Tensor:
    """Memory on the host for `size` int64, from which a copy to `device` does not block. Not initialised."""
    return torch.empty(size, dtype=torch.int64, pin_memory=device.type == "cuda")
