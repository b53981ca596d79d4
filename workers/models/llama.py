"""The Llama family: Llama 1, 2 and 3.x, SmolLM2, and what else says LlamaForCausalLM.

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


class LlamaForCausalLM(CausalLM):
    """`attention_bias` and `mlp_bias` cover all projections of their block."""

    def make_layer(
        self,
        config: TransformerConfig,
        partition: Partition,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        index: int,
    ) -> DecoderLayer:
        bias = config.attention_bias
        attention = SelfAttention(config, partition, group, dtype, qkv_bias=bias, output_bias=bias)
        mlp = GatedMLP(config, partition, group, dtype, bias=config.mlp_bias)
        return PreNormLayer(config, dtype, attention=attention, mlp=mlp)
