"""What all families share: token ids -> embedding -> layers -> norm, and the output head.

Called by: the Worker builds the family's class, the model runner calls it. Runs in a worker process; each rank
builds its own part. A family is a file beside this one: it says what a layer is, and overrides what is its own.
The head is a call of its own, because only the rows that sample go through it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import nn

from ..attention.backend import AttentionBackend
from ..forward_context import ForwardContext
from ..kernels.linear import activation_dtype
from ..layers.attention import LayerKVCache, PagedAttention
from ..layers.decoder_layer import DecoderLayer
from ..layers.embedding import ParallelHead, VocabParallelEmbedding
from ..layers.linear import StoredWeight
from ..layers.norm import RMSNorm
from ..layers.rotary import RotaryEmbedding
from ..layers.shard import TensorShard
from ..partition import Partition
from ..tp_group import TensorParallelGroup
from ..transformer_config import LayerType, TransformerConfig


class CausalLM(nn.Module, ABC):
    """The whole model of one rank.

    dtype:            of the weights
    activation_dtype: of what is computed between them, and of the logits
    """

    norm_class: ClassVar[type[RMSNorm]] = RMSNorm

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
        self.config = config
        self.embedding = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, partition, group, dtype
        )
        self.layers = nn.ModuleList(
            self.make_layer(config, partition, group, dtype, index)
            for index in range(config.num_hidden_layers)
        )
        self.activation_dtype = activation_dtype(dtype, self.embedding.weight.device)
        self.norm = self.norm_class(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = ParallelHead(
            config.vocab_size,
            config.hidden_size,
            partition,
            group,
            dtype,
            tied_to=self.embedding if config.tie_word_embeddings else None,
        )
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        self.rotaries = [
            RotaryEmbedding(
                head_size=config.head_dim,
                rope=rope,
                max_positions=max_positions,
            )
            for rope in ropes
        ]
        # Index into `rotaries` for each layer.
        has_local = config.local_rope is not None
        self.rotary_of_layer = [int(has_local and kind is LayerType.SLIDING) for kind in config.layer_types]

    @abstractmethod
    def make_layer(
        self,
        config: TransformerConfig,
        partition: Partition,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        index: int,
    ) -> DecoderLayer:
        """Build layer number `index`, this rank's part of it."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token ids [num_tokens] -> hidden states [num_tokens, hidden_size]."""
        hidden: torch.Tensor = self.embedding(token_ids)
        return hidden

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[LayerKVCache],
        context: ForwardContext,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute a step.

        token_ids, positions: [num_tokens] int64; kv_caches: one for each layer
        kept:                 [n] int64, tokens whose hidden states are wanted; None: all. What the last layer does
                              behind its attention is then done for them alone
        returns               [num_tokens or n, hidden_size] of `activation_dtype`
        """
        angles = [rotary.angles(positions) for rotary in self.rotaries]
        x, residual = self.embed(token_ids).to(self.activation_dtype), None
        last = len(self.layers) - 1
        for index, (layer, kv_cache, rotary) in enumerate(
            zip(self.layers, kv_caches, self.rotary_of_layer, strict=True)
        ):
            x, residual = layer(
                x, residual, angles[rotary], kv_cache, context, kept if index == last else None
            )
        x, _ = self.norm(x, residual)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> logits [rows, vocab_size], the same on every rank."""
        logits: torch.Tensor = self.head(hidden)
        return logits

    def compute_own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> this rank's columns of the logits [rows, head.span.size]."""
        logits: torch.Tensor = self.head.own_columns(hidden)
        return logits

    def place_tables(self, device: torch.device) -> None:
        """Compute what is neither weight nor cache."""
        for rotary in self.rotaries:
            rotary.place(device)

    def use_attention(self, backend: AttentionBackend | None) -> None:
        """Let all layers attend by `backend`; None: plain torch."""
        for module in self.modules():
            if isinstance(module, PagedAttention):
                module.backend = backend

    def pack_weights(self) -> int:
        """Store the loaded weights as the device likes them; return the bytes that this takes in addition."""
        for module in self.modules():
            if isinstance(module, StoredWeight):
                module.pack()
            elif isinstance(module, RMSNorm):
                module.widen(self.activation_dtype)
        return self.head.pack()

    def shards(self) -> Iterator[TensorShard]:
        """Every tensor of the checkpoint, and where this rank's part of it goes."""
        yield from self.embedding.shards("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.shards(f"model.layers.{index}")
        yield from self.norm.shards("model.norm")
        yield from self.head.shards("lm_head")

    def own_name(self, name: str) -> str | None:
        """What `shards` calls the tensor that the checkpoint calls `name`; None: it is not read."""
        if name.endswith("rotary_emb.inv_freq") or (self.head.is_tied and name == "lm_head.weight"):
            return None
        return name
