"""The gated MLP of one layer; this rank's columns, perhaps none. Called by: the models."""

from collections.abc import Iterator

import torch

from ..partition import Partition
from ..tp_group import TensorParallelGroup
from ..transformer_config import Activation, TransformerConfig
from .activation import GatedActivation
from .linear import MergedColumnParallelLinear, RowParallelLinear
from .plain_module import PlainModule
from .shard import TensorShard


class GatedMLP(PlainModule):
    """[num_tokens, hidden_size] -> the same: down(activation(gate) * up)."""

    def __init__(
        self,
        config: TransformerConfig,
        partition: Partition,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, config.intermediate_size, partition.own, bias=bias, dtype=dtype
        )
        self.activation = GatedActivation(config.hidden_act)
        self.has_silu = config.hidden_act is Activation.SILU
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            partition.own.mlp_columns,
            group,
            bias=bias,
            dtype=dtype,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project_down(self.gate_up_proj(x))

    def project_down(self, gate_up: torch.Tensor) -> torch.Tensor:
        """What follows `gate_up_proj`."""
        if self.has_silu:
            return self.down_proj.project_silu(gate_up)
        result: torch.Tensor = self.down_proj(self.activation(gate_up))
        return result

    def shards(self, name: str) -> Iterator[TensorShard]:
        yield from self.gate_up_proj.shards(name)
        yield from self.down_proj.shards(f"{name}.down_proj")
