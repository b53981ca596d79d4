"""Span: a range of one dimension of a tensor. Called by: the partition, the layers, the readers of checkpoints."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A contiguous range of one dimension. May be empty."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        """First index after the range."""
        return self.start + self.size
