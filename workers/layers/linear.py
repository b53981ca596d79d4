"""Linear layers split over the ranks of a replica.

Called by: the models. A column-parallel layer holds some outputs, its bias with them, and needs no exchange; a
row-parallel layer holds some inputs and sums its outputs over the ranks. Weights are [outputs, inputs], as in the
checkpoint. Several projections of the same input (gate and up; q, k and v) are one matrix here, and several
tensors in the checkpoint: `shards` says which rows belong to which.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..kernels.linear import linear, pack_weight
from ..kernels.ops import gated_silu, is_small_product_of_silu, product_in_parts, small_product_of_silu
from ..kernels.packed_weight import PackedWeight
from ..partition import RankShare
from ..span import Span
from ..tp_group import TensorParallelGroup
from .plain_module import PlainModule
from .shard import TensorShard, split_tensor, whole_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One projection inside a column-parallel layer: its outputs in the checkpoint, and ours among them."""

    name: str
    full_size: int
    span: Span


class StoredWeight(PlainModule):
    """A weight [outputs, inputs]: as loaded at first, later perhaps packed, and then the parameter is empty."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype), requires_grad=False)
        self.packed: PackedWeight | None = None

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [num_tokens, inputs], bias [outputs] -> [num_tokens, outputs]."""
        return linear(x, self.weight, bias) if self.packed is None else self.packed.product(x, bias)

    def pack(self) -> None:
        """Store the loaded weight as the device likes it; `shards` is of no use afterwards."""
        self.packed = pack_weight(self.weight)
        if self.packed is not None:
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)


class ColumnParallelLinear(StoredWeight):
    """One or more projections of the same input; this rank computes its part of each.

    [num_tokens, input_size] -> [num_tokens, sum of the columns' sizes], columns in the order given
    """

    def __init__(self, input_size: int, columns: Sequence[Column], *, bias: bool, dtype: torch.dtype) -> None:
        size = sum(column.span.size for column in columns)
        super().__init__(size, input_size, dtype)
        self.columns = tuple(columns)
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.bias)

    def shards(self, prefix: str) -> Iterator[TensorShard]:
        """prefix: of the checkpoint's names, to which each column adds its own."""
        start = 0
        for column in self.columns:
            for kind, parameter in (("weight", self.weight), ("bias", self.bias)):
                if parameter is not None:
                    target = parameter.narrow(0, start, column.span.size)
                    yield split_tensor(
                        f"{prefix}.{column.name}.{kind}",
                        target,
                        dim=0,
                        span=column.span,
                        full_size=column.full_size,
                    )
            start += column.span.size


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Gate and up projection of an MLP. Output: [num_tokens, gate columns then up columns]."""

    def __init__(
        self, input_size: int, intermediate_size: int, share: RankShare, *, bias: bool, dtype: torch.dtype
    ) -> None:
        columns = [
            Column(name=name, full_size=intermediate_size, span=share.mlp_columns)
            for name in ("gate_proj", "up_proj")
        ]
        super().__init__(input_size, columns, bias=bias, dtype=dtype)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projection of an attention layer.

    Output: [num_tokens, (query heads, KV heads, KV heads) * head_size]
    """

    def __init__(
        self,
        input_size: int,
        head_size: int,
        num_heads: int,
        num_kv_heads: int,
        share: RankShare,
        *,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        queries, kv = _in_elements(share.query_heads, head_size), _in_elements(share.kv_heads, head_size)
        columns = [
            Column(name="q_proj", full_size=num_heads * head_size, span=queries),
            Column(name="k_proj", full_size=num_kv_heads * head_size, span=kv),
            Column(name="v_proj", full_size=num_kv_heads * head_size, span=kv),
        ]
        super().__init__(input_size, columns, bias=bias, dtype=dtype)


class RowParallelLinear(StoredWeight):
    """A projection whose inputs are spread over the ranks; every rank gets the whole output.

    [num_tokens, span.size] -> [num_tokens, output_size]. A rank with an empty span adds zeros, and takes part.
    """

    leaves_parts = False
    """What follows takes parts of the output as well, [parts, num_tokens, output_size] float32, and adds them up."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        span: Span,
        group: TensorParallelGroup,
        *,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(output_size, span.size, dtype)
        self.input_size = input_size
        self.span = span
        self.group = group
        self.bias = nn.Parameter(torch.empty(output_size, dtype=dtype), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.leaves_parts and self.group.size == 1 and self.bias is None:
            parts = product_in_parts(x, self.weight)
            if parts is not None:
                return parts
        return self.group.all_reduce(self.product(x, self.own_bias))

    @property
    def own_bias(self) -> torch.Tensor | None:
        """What this rank adds of the bias: one does, or the sum would hold it once for each."""
        return self.bias if self.group.rank == 0 else None

    def project_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Project SiLU of the gate times up, [num_tokens, 2 * span.size], in one kernel where there are few rows."""
        if is_small_product_of_silu(gate_up, self.weight):
            return self.group.all_reduce(small_product_of_silu(gate_up, self.weight, self.own_bias))
        result: torch.Tensor = self(gated_silu(gate_up))
        return result

    def shards(self, name: str) -> Iterator[TensorShard]:
        yield split_tensor(f"{name}.weight", self.weight, dim=1, span=self.span, full_size=self.input_size)
        if self.bias is not None:
            yield whole_tensor(f"{name}.bias", self.bias)


class AttentionOutputLinear(RowParallelLinear):
    """The output projection of an attention layer: its inputs are this rank's query heads."""

    def __init__(
        self,
        head_size: int,
        num_heads: int,
        output_size: int,
        share: RankShare,
        group: TensorParallelGroup,
        *,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        span = _in_elements(share.query_heads, head_size)
        super().__init__(num_heads * head_size, output_size, span, group, bias=bias, dtype=dtype)


def _in_elements(heads: Span, head_size: int) -> Span:
    return Span(start=heads.start * head_size, size=heads.size * head_size)
