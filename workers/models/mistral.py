"""Mistral 7B and its kin: Llama's layers, whose queries may see the last tokens only (see kv_cache_groups.py).

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


class MistralForCausalLM(CausalLM):
    """Sliding window in all layers, when config.json gives one."""

    def make_layer(
        self,
        config: TransformerConfig,
        partition: Partition,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        index: int,
    ) -> DecoderLayer:
        attention = SelfAttention(config, partition, group, dtype)
        return PreNormLayer(config, dtype, attention=attention, mlp=GatedMLP(config, partition, group, dtype))
