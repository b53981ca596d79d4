"""Qwen 2 and 2.5: Llama's layers with biases on queries, keys and values.

Called by: the Worker, through the registry.
"""

import torch

from ..layers.decoder_layer import DecoderLayer, PreNormLayer
from ..layers.mlp import GatedMLP
from ..layers.self_attention import SelfAttention
from ..partition import Partition
from ..tp_group import TensorParallelGroup
from ..transformer_config import TransformerConfig
from .causal_lm import CausalLM


class Qwen2ForCausalLM(CausalLM):
    """The biases are always there; config.json does not speak of them."""

    def make_layer(
        self,
        config: TransformerConfig,
        partition: Partition,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        index: int,
    ) -> DecoderLayer:
        attention = SelfAttention(config, partition, group, dtype, qkv_bias=True)
        return PreNormLayer(config, dtype, attention=attention, mlp=GatedMLP(config, partition, group, dtype))
