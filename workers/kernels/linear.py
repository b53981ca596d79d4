"""Product with a weight that stays: packed as the device likes it, or as it was loaded.

Called by: layers/linear.py and layers/embedding.py.
"""

import torch
import torch.nn.functional as F

from .ops import is_product_of_few_rows, is_small_product, product_of_few_rows, small_product
from .packed_weight import HalfWeight, OneDnnWeight, PackedWeight


def pack_weight(weight: torch.Tensor) -> PackedWeight | None:
    """Return `weight` [outputs, inputs] packed, or None where there is no better layout (a GPU, empty)."""
    if weight.device.type != "cpu" or weight.numel() == 0:
        return None
    has_products = _has_products_of(weight.dtype)
    is_for_halves = weight.dtype == torch.float32 or not has_products
    if is_for_halves and "fbgemm" in torch.backends.quantized.supported_engines and HalfWeight.takes(weight):
        return HalfWeight(weight)
    return OneDnnWeight(weight) if has_products else None


def activation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return what is computed in beside weights of `dtype`: float32 on a CPU that multiplies no such numbers."""
    return torch.float32 if device.type == "cpu" and not _has_products_of(dtype) else dtype


def _has_products_of(dtype: torch.dtype) -> bool:
    """Say whether oneDNN takes packed weights of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, inputs], weight [outputs, inputs] as loaded, bias [outputs] -> [rows, outputs] of the dtype of x."""
    if is_small_product(x, weight):
        return small_product(x, weight, bias)
    if bias is None and is_product_of_few_rows(x, weight):
        return product_of_few_rows(x, weight)
    # They differ for a weight that could not be packed, beside activations of `activation_dtype`.
    return F.linear(x.to(weight.dtype), weight, bias).to(x.dtype)
