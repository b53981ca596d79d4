"""Embedding and output head, split over the ranks by vocabulary rows.

Called by: the models. Both may share one parameter (tied embeddings): they have the same rows on the same rank.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.linear import linear, pack_weight
from ..kernels.ops import embed_own_rows
from ..kernels.packed_weight import PackedWeight
from ..partition import Partition
from ..tp_group import TensorParallelGroup
from .shard import TensorShard, split_tensor


class VocabParallelEmbedding(nn.Module):
    """token ids [num_tokens] -> hidden states [num_tokens, hidden_size]; the owner of a row adds it, others zero."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        partition: Partition,
        group: TensorParallelGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.span = partition.own.vocab_rows
        self.group = group
        self.weight = nn.Parameter(torch.empty(self.span.size, hidden_size, dtype=dtype), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        return self.group.all_reduce(embed_own_rows(token_ids, self.weight, self.span.start))

    def shards(self, name: str) -> Iterator[TensorShard]:
        yield split_tensor(f"{name}.weight", self.weight, dim=0, span=self.span, full_size=self.vocab_size)


class ParallelHead(nn.Module):
    """hidden states [rows, hidden_size] -> logits [rows, vocab_size] on every rank, the same bits on each.

    tied_to: the embedding whose parameter the head uses; None: a parameter of its own.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        partition: Partition,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        *,
        tied_to: VocabParallelEmbedding | None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.span = partition.own.vocab_rows
        self.sizes = partition.vocab_sizes
        self.group = group
        # Past nn.Module, which would count the embedding as a part of the head. Its parameter is looked up in each
        # call, because giving memory to a module replaces its parameters.
        object.__setattr__(self, "_tied_to", tied_to)
        self._packed: PackedWeight | None = None
        self.own_weight: nn.Parameter | None = None
        if tied_to is None:
            weight = torch.empty(self.span.size, hidden_size, dtype=dtype)
            self.own_weight = nn.Parameter(weight, requires_grad=False)

    @property
    def is_tied(self) -> bool:
        """True when the embedding's parameter is used."""
        return self.own_weight is None

    @property
    def weight(self) -> torch.Tensor:
        """[rows of this rank, hidden_size], own or the embedding's."""
        if self.own_weight is not None:
            return self.own_weight
        tied_to: VocabParallelEmbedding = self._tied_to
        return tied_to.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.group.all_gather_last_dim(self.own_columns(hidden), self.sizes)

    def own_columns(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> this rank's logits [rows, span.size], perhaps none."""
        return linear(hidden, self.weight) if self._packed is None else self._packed.product(hidden, None)

    def pack(self) -> int:
        """Store the loaded weight as the device likes it; return the bytes that this takes in addition.

        The embedding reads single rows, so a parameter that it shares with the head stays, beside a copy.
        """
        self._packed = pack_weight(self.weight)
        if self._packed is None:
            return 0
        if self.own_weight is None:
            return self._packed.nbytes
        self.own_weight = nn.Parameter(self.own_weight.new_empty(0), requires_grad=False)
        return 0

    def shards(self, name: str) -> Iterator[TensorShard]:
        if not self.is_tied:
            yield split_tensor(
                f"{name}.weight", self.weight, dim=0, span=self.span, full_size=self.vocab_size
            )
