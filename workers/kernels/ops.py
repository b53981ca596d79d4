"""Fused operations of a layer: Triton's kernels on a GPU, the references in plain torch elsewhere.

Called by: layers/, on the worker's main thread. The choice is made by the device of the tensors; a process without a
GPU never imports Triton.
"""

from functools import cache
from importlib.util import find_spec

import torch

from . import embedding
from .gelu_and_mul import gelu_and_mul
from .rms_norm import offset_rms_norm, rms_norm
from .silu_and_mul import silu_and_mul

HAS_TRITON = torch.cuda.is_available() and find_spec("triton") is not None
if HAS_TRITON:
    from . import (
        triton_activation,
        triton_embedding,
        triton_few_rows,
        triton_linear,
        triton_norm,
        triton_rotary,
    )

_HOPPER = (9, 0)
"""Compute capability: what copies tiles of a tensor by its descriptor."""


def is_fused(x: torch.Tensor) -> bool:
    """Say whether Triton's kernels take this tensor."""
    return HAS_TRITON and x.is_cuda


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    *,
    is_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised sum of `x` and `residual`, and the sum (`x` itself without a residual).

    x, residual: [num_tokens, size]; weight: [size]; is_offset: scale by 1 + weight, see `offset_rms_norm`
    x may also be what `product_in_parts` returns.
    """
    if is_fused(x):
        return triton_norm.add_rms_norm(x, residual, weight, epsilon, is_offset=is_offset)
    if x.dim() == 3:
        x = x.sum(0).to(weight.dtype)
    total = x if residual is None else x + residual
    norm = offset_rms_norm if is_offset else rms_norm
    return norm(total, weight, epsilon), total


def gated_silu(x: torch.Tensor) -> torch.Tensor:
    """See `silu_and_mul`."""
    return triton_activation.gated_activation(x, is_gelu=False) if is_fused(x) else silu_and_mul(x)


def gated_gelu(x: torch.Tensor) -> torch.Tensor:
    """See `gelu_and_mul`."""
    return triton_activation.gated_activation(x, is_gelu=True) if is_fused(x) else gelu_and_mul(x)


def embed_own_rows(token_ids: torch.Tensor, weight: torch.Tensor, first_row: int) -> torch.Tensor:
    """See `kernels.embedding.embed_own_rows`."""
    if is_fused(weight):
        return triton_embedding.embed_own_rows(token_ids, weight, first_row)
    return embedding.embed_own_rows(token_ids, weight, first_row)


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    num_heads: int,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    epsilon: float,
    is_offset: bool,
) -> torch.Tensor:
    """See `triton_rotary.rotate_and_store`; only where `is_fused` says so."""
    return triton_rotary.rotate_and_store(
        qkv,
        cos,
        sin,
        k_cache,
        v_cache,
        slot_mapping,
        num_heads=num_heads,
        q_weight=q_weight,
        k_weight=k_weight,
        epsilon=epsilon,
        is_offset=is_offset,
    )


def is_small_product(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether x [rows, inputs] times weight [outputs, inputs] is for our own kernel."""
    return _is_small(x, weight) and triton_linear.is_faster(x.shape[0], *weight.shape)


def is_small_product_of_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """As `is_small_product`, with the norm of x in the same kernel."""
    return _is_small(x, weight) and triton_linear.takes_norm(x.shape[0], *weight.shape)


def is_small_product_of_silu(gate_up: torch.Tensor, weight: torch.Tensor) -> bool:
    """As `is_small_product`, with the gated activation of gate_up [rows, 2 * inputs] in the same kernel."""
    return _is_small(gate_up, weight) and triton_linear.takes_silu(gate_up.shape[0], *weight.shape)


def _is_small(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return is_fused(weight) and 1 <= x.shape[0] <= triton_linear.MAX_ROWS and weight.numel() > 0


def small_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `triton_linear.gemv`; only where `is_small_product` says so."""
    return triton_linear.gemv(x.contiguous(), weight, bias)


def small_product_of_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    epsilon: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_offset: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `triton_linear.norm_gemv`; only where `is_small_product_of_norm` says so."""
    return triton_linear.norm_gemv(x, residual, norm_weight, epsilon, weight, bias, is_offset=is_offset)


def small_product_of_silu(
    gate_up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """See `triton_linear.silu_gemv`; only where `is_small_product_of_silu` says so."""
    return triton_linear.silu_gemv(gate_up, weight, bias)


def is_product_of_few_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether x [rows, inputs] times weight [outputs, inputs] is for `product_of_few_rows`."""
    return _takes_few_rows(weight) and triton_few_rows.is_faster(x.shape[0], *weight.shape)


def product_of_few_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `triton_few_rows.product_of_few_rows`; only where `is_product_of_few_rows` says so."""
    return triton_few_rows.product_of_few_rows(x.contiguous(), weight)


def product_in_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Return what `triton_few_rows.product_in_parts` does of x and weight; None: that is not for them."""
    if not _takes_few_rows(weight):
        return None
    tuning = triton_few_rows.tuning_for_parts(x.shape[0], *weight.shape)
    return None if tuning is None else triton_few_rows.product_in_parts(x.contiguous(), weight, tuning)


def _takes_few_rows(weight: torch.Tensor) -> bool:
    return is_fused(weight) and weight.itemsize == 2 and weight.numel() > 0 and _is_hopper(weight.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == _HOPPER
