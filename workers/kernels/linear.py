"""Product with a weight that stays, stored as the device likes it.

Called by: layers/linear.py and layers/embedding.py. On CPU a weight can be packed: oneDNN's blocked layout, which
reads memory in one run; products of few rows, as in decode, take half the time then.
"""

import torch
import torch.nn.functional as F

from .ops import is_small_product, small_product

PACKED_FOR_ROWS = 8
"""The layout that oneDNN chooses for so many rows is as fast as any other for 1 to 256 rows. For 1 it is not."""


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [outputs, inputs] packed, or itself where there is no better layout (a GPU, float16, empty).

    A packed tensor is opaque: only `linear` takes it.
    """
    if weight.device.type != "cpu" or weight.numel() == 0 or not torch.backends.mkldnn.is_available():
        return weight
    is_supported = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS) if is_supported else weight


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, inputs], weight [outputs, inputs], packed or not, bias [outputs] -> [rows, outputs]."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if is_small_product(x, weight):
        return small_product(x, weight, bias)
    return F.linear(x, weight, bias)
