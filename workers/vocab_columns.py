"""Which columns of the logits a rank has before it, and how it learns of the others.

Called by: every stage of the sampler. The same code samples from whole rows and, under tensor parallelism, from a
part of each row: it asks these objects wherever a row's answer needs all of its columns. Every answer is the same
on every rank, bit by bit, because it is computed from the same gathered numbers.
When a peer dies: as the group says (tp_group.py).
"""

import math
from typing import Protocol

import torch

from .span import Span
from .tp_group import TensorParallelGroup

ALIGNMENT = 64
"""Ranges begin at multiples of this: no word of a grammar's mask and no four ids of the noise are ever split."""
_MIN_PART, _MAX_PART = 64, 256
"""Columns of which the largest is found first, where the whole can be cut so; both are powers of two."""


class VocabColumns(Protocol):
    """A range of token ids: `width` columns from `first_id` on."""

    @property
    def first_id(self) -> int: ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Put what each rank has of a few numbers side by side. x: [rows, n]; returns [rows, ranks * n]."""
        ...


class WholeVocabulary:
    """All columns: nobody needs to be asked."""

    first_id = 0

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


class VocabShard:
    """This rank's columns. span: of its token ids; the ranks' spans follow each other in the order of the ranks."""

    def __init__(self, group: TensorParallelGroup, span: Span, vocab_size: int) -> None:
        assert span.start % ALIGNMENT == 0 or span.size == 0, "a range of token ids begins inside a word"
        self._group = group
        # A rank may hold no column; then it has one of an id that no token has.
        self.first_id = span.start if span.size else -(-vocab_size // ALIGNMENT) * ALIGNMENT

    def fill(self, logits: torch.Tensor) -> torch.Tensor:
        """Give a rank without columns its one. logits: [rows, span.size]; returns [rows, at least 1]."""
        return logits if logits.shape[-1] else logits.new_full((logits.shape[0], 1), -torch.inf)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.all_gather_last_dim(x.contiguous(), [x.shape[-1]] * self._group.size)


WHOLE = WholeVocabulary()


def any_of(columns: VocabColumns, found: torch.Tensor) -> torch.Tensor:
    """Which rows have it on any rank. found: [rows] bool; returns [rows] bool."""
    if columns is WHOLE:
        return found
    return columns.gather(found.unsqueeze(-1).float()).amax(dim=-1) > 0.0


def sum_of(columns: VocabColumns, part: torch.Tensor) -> torch.Tensor:
    """Add up over the ranks, in their order. part: [rows]; returns the same."""
    return part if columns is WHOLE else columns.gather(part.unsqueeze(-1)).sum(dim=-1)


def max_of(columns: VocabColumns, part: torch.Tensor) -> torch.Tensor:
    """Take the largest of all ranks. part: [rows]; returns the same."""
    return part if columns is WHOLE else columns.gather(part.unsqueeze(-1)).amax(dim=-1)


def first_argmax(x: torch.Tensor) -> torch.Tensor:
    """Index of the largest value of each row, the lowest index on ties. x: [rows, n]; returns [rows] int64."""
    if x.device.type == "cpu":
        width = math.gcd(x.shape[-1], _MAX_PART)
        return _argmax_by_parts(x, width) if width >= _MIN_PART else x.argmax(dim=-1)
    # argmax leaves open which of several equal values it returns on a GPU.
    index = torch.arange(x.shape[-1], device=x.device)
    is_best = x == x.amax(dim=-1, keepdim=True)
    return torch.where(is_best, index, x.shape[-1] - 1).amin(dim=-1)


def _argmax_by_parts(x: torch.Tensor, width: int) -> torch.Tensor:
    """Look for the best part of each row, then in it: a NaN is the largest, and the first of equals wins, as always.

    torch looks for a maximum several numbers at a time, but for its place one by one: eight times as slow for 8 rows
    of 49152.
    """
    parts = x.unflatten(-1, (-1, width))
    best = parts.amax(dim=-1).argmax(dim=-1, keepdim=True)
    in_best = parts.gather(1, best.unsqueeze(-1).expand(-1, -1, width)).squeeze(1)
    return best.squeeze(-1) * width + in_best.argmax(dim=-1)


def best_of(columns: VocabColumns, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the largest value of each row, and the lowest token id that has it.

    x: [rows, width] float; returns ([rows] of x's type, [rows] int64)
    """
    index = first_argmax(x)
    return best_of_all(columns, x.gather(-1, index.unsqueeze(-1)).squeeze(-1), index + columns.first_id)


def best_of_all(
    columns: VocabColumns, value: torch.Tensor, token_id: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the best of what each rank has found for itself. value: [rows] float; token_id: [rows] int64."""
    if columns is WHOLE:
        return value, token_id
    # Ids are exact in float64, and so are values of 32 bits: one exchange instead of two.
    pairs = columns.gather(torch.stack([value.double(), token_id.double()], dim=-1)).unflatten(-1, (-1, 2))
    rank = first_argmax(pairs[..., 0]).unsqueeze(-1)
    values, token_ids = pairs[..., 0].gather(-1, rank), pairs[..., 1].gather(-1, rank)
    return values.squeeze(-1).to(value.dtype), token_ids.squeeze(-1).long()
