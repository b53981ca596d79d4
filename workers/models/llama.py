"""The Llama family: Llama 1, 2 and 3.x, SmolLM2, and what else says LlamaForCausalLM.

Called by: the model runner. Runs in a worker process; each rank builds its own part.

One step: token ids -> embedding -> layers (norm, attention, norm, MLP; the residual runs beside) -> norm. The head
is a call of its own, because only the rows that sample go through it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..forward_context import ForwardContext
from ..layers.activation import SiluAndMul
from ..layers.attention import LayerKVCache, PagedAttention
from ..layers.embedding import ParallelHead, VocabParallelEmbedding
from ..layers.linear import (
    AttentionOutputLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from ..layers.norm import RMSNorm
from ..layers.rotary import RotaryEmbedding, rotate
from ..layers.shard import TensorShard
from ..partition import Partition
from ..tp_group import TensorParallelGroup
from ..transformer_config import TransformerConfig


class LlamaAttention(nn.Module):
    """Self-attention of one layer; this rank's heads."""

    def __init__(
        self, config: TransformerConfig, partition: Partition, group: TensorParallelGroup, dtype: torch.dtype
    ) -> None:
        super().__init__()
        share = partition.own
        self.head_size = config.head_dim
        self.sizes = [
            heads * config.head_dim
            for heads in (share.query_heads.size, share.kv_heads.size, share.kv_heads.size)
        ]
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            share,
            bias=config.attention_bias,
            dtype=dtype,
        )
        self.attention = PagedAttention(config.head_dim)
        self.o_proj = AttentionOutputLinear(
            config.head_dim,
            config.num_attention_heads,
            config.hidden_size,
            share,
            group,
            bias=config.attention_bias,
            dtype=dtype,
        )

    def forward(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv_cache: LayerKVCache,
        context: ForwardContext,
    ) -> torch.Tensor:
        # each [num_tokens, heads, head_size]
        q, k, v = (
            part.unflatten(-1, (-1, self.head_size)) for part in self.qkv_proj(x).split(self.sizes, dim=-1)
        )
        output = self.attention(rotate(q, *angles), rotate(k, *angles), v, kv_cache, context)
        return self.o_proj(output.flatten(1))

    def shards(self, name: str) -> Iterator[TensorShard]:
        yield from self.qkv_proj.shards(name)
        yield from self.o_proj.shards(f"{name}.o_proj")


class LlamaMLP(nn.Module):
    """Gated MLP of one layer; this rank's columns, perhaps none."""

    def __init__(
        self, config: TransformerConfig, partition: Partition, group: TensorParallelGroup, dtype: torch.dtype
    ) -> None:
        super().__init__()
        columns = partition.own.mlp_columns
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, config.intermediate_size, partition.own, bias=config.mlp_bias, dtype=dtype
        )
        self.activation = SiluAndMul()
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, columns, group, bias=config.mlp_bias, dtype=dtype
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(x)))

    def shards(self, name: str) -> Iterator[TensorShard]:
        yield from self.gate_up_proj.shards(name)
        yield from self.down_proj.shards(f"{name}.down_proj")


class LlamaLayer(nn.Module):
    """One decoder layer. Takes and returns (hidden states, residual)."""

    def __init__(
        self, config: TransformerConfig, partition: Partition, group: TensorParallelGroup, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = LlamaAttention(config, partition, group, dtype)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = LlamaMLP(config, partition, group, dtype)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv_cache: LayerKVCache,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_norm(x, residual)
        x = self.attention(x, angles, kv_cache, context)
        x, residual = self.post_norm(x, residual)
        return self.mlp(x), residual

    def shards(self, name: str) -> Iterator[TensorShard]:
        yield from self.input_norm.shards(f"{name}.input_layernorm")
        yield from self.attention.shards(f"{name}.self_attn")
        yield from self.post_norm.shards(f"{name}.post_attention_layernorm")
        yield from self.mlp.shards(f"{name}.mlp")


class LlamaForCausalLM(nn.Module):
    """The whole model of one rank.

    Raises UnsupportedModelError for an activation or rope type that is not the family's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        partition: Partition,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        *,
        max_positions: int,
    ) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise UnsupportedModelError(
                f"hidden_act {config.hidden_act!r} is not silu, as in all Llama models"
            )
        self.embedding = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, partition, group, dtype
        )
        self.layers = nn.ModuleList(
            LlamaLayer(config, partition, group, dtype) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = ParallelHead(
            config.vocab_size,
            config.hidden_size,
            partition,
            group,
            dtype,
            tied_to=self.embedding if config.tie_word_embeddings else None,
        )
        self.rotary = RotaryEmbedding(
            head_size=config.head_dim,
            theta=config.rope_theta,
            rope_scaling=config.rope_scaling,
            max_positions=max_positions,
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[LayerKVCache],
        context: ForwardContext,
    ) -> torch.Tensor:
        """Compute a step.

        token_ids, positions: [num_tokens] int64; kv_caches: one for each layer
        returns               [num_tokens, hidden_size]
        """
        angles = self.rotary.angles(positions)
        x, residual = self.embedding(token_ids), None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x, residual = layer(x, residual, angles, kv_cache, context)
        x, _ = self.norm(x, residual)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> logits [rows, vocab_size], the same on every rank."""
        return self.head(hidden)

    def place_tables(self, device: torch.device) -> None:
        """Compute what is neither weight nor cache."""
        self.rotary.place(device)

    def shards(self) -> Iterator[TensorShard]:
        """Every tensor of the checkpoint, and where this rank's part of it goes."""
        yield from self.embedding.shards("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaLayer)
            yield from layer.shards(f"model.layers.{index}")
        yield from self.norm.shards("model.norm")
        yield from self.head.shards("lm_head")

    def is_ignored(self, name: str) -> bool:
        """True for a tensor that checkpoints may hold and that is not read."""
        return name.endswith("rotary_emb.inv_freq") or (self.head.is_tied and name == "lm_head.weight")
