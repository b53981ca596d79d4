"""TensorShard: which part of a checkpoint's tensor goes where. Said by each layer, carried out by weights.py.

Called by: the layers' `shards(name)`, once the parameters have memory. Runs in a worker process.
"""

from dataclasses import dataclass

import torch

from ..span import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """One tensor of the checkpoint, and this rank's part of it.

    name:       as in the checkpoint
    full_shape: what the checkpoint must hold
    dim, span:  the part along one dimension that this rank wants; None: all of it
    target:     a view into a parameter, of the part's shape
    """

    name: str
    full_shape: tuple[int, ...]
    dim: int | None
    span: Span | None
    target: torch.Tensor


def whole_tensor(name: str, target: torch.Tensor) -> TensorShard:
    """A tensor that every rank holds whole."""
    return TensorShard(name=name, full_shape=tuple(target.shape), dim=None, span=None, target=target)


def split_tensor(name: str, target: torch.Tensor, *, dim: int, span: Span, full_size: int) -> TensorShard:
    """A tensor of which this rank holds `span` of `full_size` along `dim`."""
    assert target.shape[dim] == span.size, f"{name}: {tuple(target.shape)} does not hold {span}"
    full_shape = list(target.shape)
    full_shape[dim] = full_size
    return TensorShard(name=name, full_shape=tuple(full_shape), dim=dim, span=span, target=target)
