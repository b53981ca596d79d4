"""The self-attention block of one layer: projections, rotary embedding, attention; this rank's heads.

Called by: the models, which say what their family has of it: biases, norms of queries and keys, a scale.
"""

from collections.abc import Iterator

import torch

from ..forward_context import ForwardContext
from ..kernels.ops import is_fused, rotate_and_store
from ..partition import Partition
from ..tp_group import TensorParallelGroup
from ..transformer_config import TransformerConfig
from .attention import LayerKVCache, PagedAttention
from .linear import AttentionOutputLinear, QKVParallelLinear
from .norm import RMSNorm
from .plain_module import PlainModule
from .rotary import rotate
from .shard import TensorShard


class SelfAttention(PlainModule):
    """[num_tokens, hidden_size] -> the same, or the rows of it that are asked for.

    angles:      as `RotaryEmbedding.angles` gives them
    scale:       of the products of queries and keys; None: the inverse square root of the head size
    qkv_bias:    the three input projections have biases
    output_bias: the output projection has one
    qk_norm:     kind of the norm over each head of queries and keys, before they are rotated; None: there is none
    """

    def __init__(
        self,
        config: TransformerConfig,
        partition: Partition,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        *,
        scale: float | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: type[RMSNorm] | None = None,
    ) -> None:
        super().__init__()
        share, head_size = partition.own, config.head_dim
        self.head_size = head_size
        self.num_heads, self.num_kv_heads = share.query_heads.size, share.kv_heads.size
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            head_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            share,
            bias=qkv_bias,
            dtype=dtype,
        )
        self.q_norm: RMSNorm | None = (
            None if qk_norm is None else qk_norm(head_size, config.rms_norm_eps, dtype)
        )
        self.k_norm: RMSNorm | None = (
            None if qk_norm is None else qk_norm(head_size, config.rms_norm_eps, dtype)
        )
        self.attention = PagedAttention(head_size, scale=scale)
        self.o_proj = AttentionOutputLinear(
            head_size,
            config.num_attention_heads,
            config.hidden_size,
            share,
            group,
            bias=output_bias,
            dtype=dtype,
        )

    def forward(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv_cache: LayerKVCache,
        context: ForwardContext,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.attend(self.qkv_proj(x), angles, kv_cache, context, kept)

    def attend(
        self,
        qkv: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv_cache: LayerKVCache,
        context: ForwardContext,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What follows `qkv_proj`. kept: see `DecoderLayer`."""
        # [num_tokens, heads, head_size]
        qkv = qkv.view(qkv.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_size)
        if is_fused(qkv):
            output = self._attend_fused(qkv, angles, kv_cache, context)
        else:
            output = self._attend_plain(qkv, angles, kv_cache, context)
        if kept is not None:
            output = output.index_select(0, kept)
        result: torch.Tensor = self.o_proj(output.flatten(1))
        return result

    def _attend_fused(
        self,
        qkv: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv_cache: LayerKVCache,
        context: ForwardContext,
    ) -> torch.Tensor:
        """One kernel makes the queries and stores keys and values."""
        q = rotate_and_store(
            qkv,
            *angles,
            kv_cache.k,
            kv_cache.v,
            context.slot_mappings[kv_cache.group],
            num_heads=self.num_heads,
            q_weight=self.q_norm.weight if self.q_norm is not None else None,
            k_weight=self.k_norm.weight if self.k_norm is not None else None,
            epsilon=self.q_norm.epsilon if self.q_norm is not None else 0.0,
            is_offset=self.q_norm is not None and self.q_norm.is_offset,
        )
        return self.attention.attend(q, kv_cache, context)

    def _attend_plain(
        self,
        qkv: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv_cache: LayerKVCache,
        context: ForwardContext,
    ) -> torch.Tensor:
        qk, v = qkv.split_with_sizes((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is None or self.k_norm is None:
            q, k = self._split(rotate(qk, *angles))
        else:
            q, k = self._split(qk)
            q, k = rotate(self.q_norm.normalize(q), *angles), rotate(self.k_norm.normalize(k), *angles)
        output: torch.Tensor = self.attention(q, k, v, kv_cache, context)
        return output

    def _split(self, qk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = qk.split_with_sizes((self.num_heads, self.num_kv_heads), dim=1)
        return q, k

    def shards(self, name: str) -> Iterator[TensorShard]:
        yield from self.qkv_proj.shards(name)
        yield from self.o_proj.shards(f"{name}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.shards(f"{name}.q_norm")
            yield from self.k_norm.shards(f"{name}.k_norm")
