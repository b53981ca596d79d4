"""A decoder layer: what every family's is to the model, and the one that most families have.

Called by: the models. A family with other norms writes its own layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from ..forward_context import ForwardContext
from ..transformer_config import TransformerConfig
from .attention import LayerKVCache
from .mlp import GatedMLP
from .norm import RMSNorm
from .plain_module import PlainModule
from .self_attention import SelfAttention
from .shard import TensorShard


class DecoderLayer(PlainModule, ABC):
    """One layer. Takes and returns (hidden states, residual), each [num_tokens, hidden_size]; their sum counts.

    kept: [n] int64, the tokens of which anybody reads what the layer returns, which is of these alone; None: all
    """

    @abstractmethod
    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv_cache: LayerKVCache,
        context: ForwardContext,
        kept: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @abstractmethod
    def shards(self, name: str) -> Iterator[TensorShard]:
        """Every tensor of the layer, which the checkpoint calls `name`."""
        ...


class PreNormLayer(DecoderLayer):
    """A norm before the attention and one before the MLP."""

    def __init__(
        self, config: TransformerConfig, dtype: torch.dtype, *, attention: SelfAttention, mlp: GatedMLP
    ) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = attention
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = mlp
        # Each is followed by a norm, in this layer or in the next, that takes the residual in as well.
        attention.o_proj.leaves_parts = mlp.down_proj.leaves_parts = True

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv_cache: LayerKVCache,
        context: ForwardContext,
        kept: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        qkv, residual = self.input_norm.project(x, residual, self.attention.qkv_proj)
        x = self.attention.attend(qkv, angles, kv_cache, context, kept)
        if kept is not None:
            residual = residual.index_select(0, kept)
        gate_up, residual = self.post_norm.project(x, residual, self.mlp.gate_up_proj)
        return self.mlp.project_down(gate_up), residual

    def shards(self, name: str) -> Iterator[TensorShard]:
        yield from self.input_norm.shards(f"{name}.input_layernorm")
        yield from self.attention.shards(f"{name}.self_attn")
        yield from self.post_norm.shards(f"{name}.post_attention_layernorm")
        yield from self.mlp.shards(f"{name}.mlp")
