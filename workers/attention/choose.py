"""Which attention backend a rank uses: the best one that is installed and takes its shapes.

Called by: the Worker, once, when it starts. Imports a package only to use it.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from ..partition import RankShare
from ..transformer_config import TransformerConfig
from .backend import AttentionBackend, AttentionShape

TORCH = "torch"
"""What a rank uses when nothing else is there: groups of rows, kernels/paged_attention.py."""
_HOPPER = (9, 0)
_FLASH_ATTENTION_3 = "flash_attn_interface"
_FLASH_ATTENTION_2 = "flash_attn"


def choose_for_rank(
    config: TransformerConfig,
    share: RankShare,
    *,
    block_size: int,
    max_rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionBackend | None:
    """Return the backend for one rank's heads of a model; None as below, and for a rank without heads.

    max_rows: of a step
    """
    if share.kv_heads.size == 0:
        return None
    shape = AttentionShape(
        num_heads=share.query_heads.size,
        num_kv_heads=share.kv_heads.size,
        head_size=config.head_dim,
        block_size=block_size,
        max_rows=max_rows,
        dtype=dtype,
        device=device,
    )
    return choose_attention_backend(shape)


def choose_attention_backend(shape: AttentionShape) -> AttentionBackend | None:
    """Return the backend for a rank's shapes; None: plain torch, on a CPU or without Triton."""
    if shape.device.type != "cuda" or find_spec("triton") is None:
        return None
    # Triton is imported where it is used only: a machine without a GPU need not have it.
    from .flash_attention import FLASH_ATTENTION_2_BLOCK, MAX_HEAD_SIZE, FlashAttention2, FlashAttention3
    from .triton_backend import TritonAttention

    takes_flash = shape.dtype in (torch.bfloat16, torch.float16) and (
        shape.head_size <= MAX_HEAD_SIZE and shape.head_size % 8 == 0
    )
    if takes_flash and torch.cuda.get_device_capability(shape.device) == _HOPPER:
        package = _try_import(_FLASH_ATTENTION_3, "flash_attn_with_kvcache")
        if package is not None:
            return FlashAttention3(shape, package)
    if takes_flash and shape.block_size % FLASH_ATTENTION_2_BLOCK == 0:
        package = _try_import(_FLASH_ATTENTION_2, "flash_attn_varlen_func")
        if package is not None:
            return FlashAttention2(shape, package)
    return TritonAttention(shape)


def _try_import(name: str, function: str) -> ModuleType | None:
    """Import a package that may be missing, or built for another torch; None when it does not have the function."""
    try:
        module = import_module(name)
    except (ImportError, OSError):
        return None
    return module if hasattr(module, function) else None
