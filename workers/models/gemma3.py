"""Gemma 3, the text model: alone, or as the text part of a model that also sees images.

Called by: the Worker, through the registry. Five of six layers see a window and have a rotary embedding of their
own; norms scale by one plus their weight, and stand on both sides of attention and MLP.
"""

from collections.abc import Iterator

import torch

from ..forward_context import ForwardContext
from ..layers.attention import LayerKVCache
from ..layers.decoder_layer import DecoderLayer
from ..layers.mlp import GatedMLP
from ..layers.norm import OffsetRMSNorm
from ..layers.self_attention import SelfAttention
from ..layers.shard import TensorShard
from ..partition import Partition
from ..tp_group import TensorParallelGroup
from ..transformer_config import TransformerConfig
from .causal_lm import CausalLM

TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.", ""),
)
"""How the text part's tensors are called where there is an image part, and here; the first that fits holds."""
IMAGE_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


class Gemma3Layer(DecoderLayer):
    """Norm, attention, norm, add; norm, MLP, norm, add."""

    def __init__(
        self,
        config: TransformerConfig,
        partition: Partition,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        index: int,
    ) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_norm = OffsetRMSNorm(size, epsilon, dtype)
        self.attention = SelfAttention(
            config,
            partition,
            group,
            dtype,
            scale=(config.query_pre_attn_scalar or config.head_dim) ** -0.5,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=OffsetRMSNorm,
        )
        self.attention_norm = OffsetRMSNorm(size, epsilon, dtype)
        self.pre_mlp_norm = OffsetRMSNorm(size, epsilon, dtype)
        self.mlp = GatedMLP(config, partition, group, dtype)
        self.mlp_norm = OffsetRMSNorm(size, epsilon, dtype)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv_cache: LayerKVCache,
        context: ForwardContext,
        kept: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_norm(x, residual)
        if kept is not None:
            residual = residual.index_select(0, kept)
        x, _ = self.attention_norm(self.attention(x, angles, kv_cache, context, kept))
        x, residual = self.pre_mlp_norm(x, residual)
        x, _ = self.mlp_norm(self.mlp(x))
        return x, residual

    def shards(self, name: str) -> Iterator[TensorShard]:
        yield from self.input_norm.shards(f"{name}.input_layernorm")
        yield from self.attention.shards(f"{name}.self_attn")
        yield from self.attention_norm.shards(f"{name}.post_attention_layernorm")
        yield from self.pre_mlp_norm.shards(f"{name}.pre_feedforward_layernorm")
        yield from self.mlp.shards(f"{name}.mlp")
        yield from self.mlp_norm.shards(f"{name}.post_feedforward_layernorm")


class Gemma3ForCausalLM(CausalLM):
    """Embeddings are scaled by the square root of their size, in their own dtype."""

    norm_class = OffsetRMSNorm

    def make_layer(
        self,
        config: TransformerConfig,
        partition: Partition,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        index: int,
    ) -> DecoderLayer:
        return Gemma3Layer(config, partition, group, dtype, index)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden = super().embed(token_ids)
        return hidden * torch.tensor(self.config.hidden_size**0.5, dtype=hidden.dtype, device=hidden.device)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._cap(super().compute_logits(hidden))

    def compute_own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._cap(super().compute_own_logits(hidden))

    def _cap(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def own_name(self, name: str) -> str | None:
        if name.startswith(IMAGE_PREFIXES):
            return None
        for theirs, ours in TEXT_PREFIXES:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
                break
        return super().own_name(name)
