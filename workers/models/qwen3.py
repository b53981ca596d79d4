"""Qwen 3, dense: each head of queries and keys has a norm.

Called by: the Worker, through the registry.
"""

import torch

from ..layers.decoder_layer import DecoderLayer, PreNormLayer
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.self_attention import SelfAttention
from ..partition import Partition
from ..tp_group import TensorParallelGroup
from ..transformer_config import TransformerConfig
from .causal_lm import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """`attention_bias` covers all four projections."""

    def make_layer(
        self,
        config: TransformerConfig,
        partition: Partition,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        index: int,
    ) -> DecoderLayer:
        attention = SelfAttention(
            config,
            partition,
            group,
            dtype,
            qk_norm=RMSNorm,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
        )
        return PreNormLayer(config, dtype, attention=attention, mlp=GatedMLP(config, partition, group, dtype))
