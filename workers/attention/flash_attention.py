"""Attention backends over the flash-attention packages, for the rows of prompts; decoding rows use our own kernel.

Called by: see backend.py. Both packages are optional: choose.py asks for them. `cluster-bench kernels` measures our
decode kernel beside FlashAttention-3's; prompts are what theirs are for. With a window they do multiply what lies
behind a row's last token by zero, which a NaN there would survive; a cache holds zeros and what was computed.
"""

from typing import Any

import torch

from .backend import AttentionShape, PromptLens, SeenCache
from .triton_backend import TritonAttention

_NO_WINDOW = (-1, -1)
MAX_HEAD_SIZE = 256
FLASH_ATTENTION_2_BLOCK = 256
"""FlashAttention-2 takes blocks of a multiple of so many tokens."""


class FlashAttention3(TritonAttention):
    """FlashAttention-3, module `flash_attn_interface`: for Hopper, 16-bit numbers. package: that module."""

    name = "flash-attention-3"
    # Its programs find out on the card what there is to do.
    max_recorded_tokens = 1 << 20

    def __init__(self, shape: AttentionShape, package: Any) -> None:
        super().__init__(shape)
        self._attend = package.flash_attn_with_kvcache

    def prefill(self, q: torch.Tensor, seen: SeenCache, lens: PromptLens) -> torch.Tensor:
        result: torch.Tensor = self._attend(
            q,
            seen.k_cache,
            seen.v_cache,
            page_table=seen.block_tables,
            cache_seqlens=seen.kv_lens,
            cu_seqlens_q=lens.query_starts,
            max_seqlen_q=lens.max_query_len,
            softmax_scale=seen.scale,
            causal=True,
            window_size=_window_size(seen.window),
        )
        return result


class FlashAttention2(TritonAttention):
    """FlashAttention-2, package `flash_attn`: 16-bit numbers. Tested against its signature only, not on a card."""

    name = "flash-attention-2"
    # No card has shown that it may.
    max_recorded_tokens = 0

    def __init__(self, shape: AttentionShape, package: Any) -> None:
        super().__init__(shape)
        self._attend = package.flash_attn_varlen_func

    def prefill(self, q: torch.Tensor, seen: SeenCache, lens: PromptLens) -> torch.Tensor:
        key_starts = torch.nn.functional.pad(seen.kv_lens.cumsum(0, dtype=torch.int32), (1, 0))
        result: torch.Tensor = self._attend(
            q,
            seen.k_cache,
            seen.v_cache,
            cu_seqlens_q=lens.query_starts,
            cu_seqlens_k=key_starts,
            max_seqlen_q=lens.max_query_len,
            max_seqlen_k=lens.max_kv_len,
            softmax_scale=seen.scale,
            causal=True,
            window_size=_window_size(seen.window),
            block_table=seen.block_tables,
        )
        return result


def _window_size(window: int | None) -> tuple[int, int]:
    """Keys to the left of a query's own, and to its right."""
    return _NO_WINDOW if window is None else (window - 1, 0)
