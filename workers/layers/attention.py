"""The attention of one layer: store the new keys and values, then attend over the cache.

Called by: the models, once per layer and step.
"""

from dataclasses import dataclass

import torch

from ..attention.backend import AttentionBackend
from ..forward_context import ForwardContext
from ..kernels.kv_cache import write_kv
from ..kernels.paged_attention import paged_attention
from .plain_module import PlainModule


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKVCache:
    """The cache of one layer.

    k, v:  [num_blocks, block_size, num_kv_heads, head_size]; block 0 stays zero. Shared with a layer of each other
           KV cache group: no block is in the tables of two groups
    group: whose block table leads to this layer's tokens
    """

    k: torch.Tensor
    v: torch.Tensor
    group: int = 0


class PagedAttention(PlainModule):
    """q [num_tokens, num_heads, head_size]; k, v [num_tokens, num_kv_heads, head_size] -> like q.

    scale:   of the products of queries and keys; None: the inverse square root of the head size
    backend: what reads block tables on the device; None: plain torch, over groups of rows

    Which tokens a query sees is a matter of the layer's KV cache group.
    """

    def __init__(self, head_size: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.scale = head_size**-0.5 if scale is None else scale
        self.backend: AttentionBackend | None = None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: LayerKVCache,
        context: ForwardContext,
    ) -> torch.Tensor:
        write_kv(k, v, kv_cache.k, kv_cache.v, context.slot_mappings[kv_cache.group])
        return self.attend(q, kv_cache, context)

    def attend(self, q: torch.Tensor, kv_cache: LayerKVCache, context: ForwardContext) -> torch.Tensor:
        """As `forward`, when the new keys and values are in the cache already."""
        if self.backend is not None and context.rows is not None:
            return self.backend.attend(
                q,
                kv_cache.k,
                kv_cache.v,
                context.rows,
                kv_cache.group,
                scale=self.scale,
                window=context.windows[kv_cache.group],
            )
        return paged_attention(q, kv_cache.k, kv_cache.v, context.groups[kv_cache.group], scale=self.scale)
