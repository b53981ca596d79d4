"""Partition: which part of a model each tensor-parallel rank holds.

Called by: every parallel layer, the weight loader and the KV cache, in the worker processes; the command line
asks it early whether a split is possible. Pure, no torch. All ranks derive the same object from the same numbers.

Invariant: the ranges of all ranks cover queries, MLP columns and vocabulary exactly once. KV heads are covered
exactly once as long as there are at least as many of them as ranks; beyond that each rank holds one KV head,
which some of its peers hold too, and a part of that head's queries.

    9 queries, 3 KV heads        tp 2:  [q0-5 | kv0,1]  [q6-8 | kv2]
                                 tp 4:  [q0,1 | kv0]  [q2 | kv0]  [q3-5 | kv1]  [q6-8 | kv2]
"""

import heapq
import math
from dataclasses import dataclass

from ..shm.errors import ConfigError
from .span import Span
from .transformer_config import TransformerConfig

VOCAB_UNIT = 64
"""Vocabulary rows are given out in multiples of this, so that a rank's matrix product is aligned."""
MLP_UNIT = 16
"""MLP columns are given out in multiples of this, or of the largest common divisor with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What one rank holds, in heads, columns and rows.

    Its queries are contiguous and divide evenly over its KV heads, so one group size serves the whole rank.
    """

    query_heads: Span
    kv_heads: Span
    mlp_columns: Span
    vocab_rows: Span

    @property
    def group_size(self) -> int:
        """Queries that read one KV head on this rank."""
        return self.query_heads.size // self.kv_heads.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The shares of all ranks, and which of them is ours."""

    tp_rank: int
    shares: tuple[RankShare, ...]

    @property
    def tp_size(self) -> int:
        """Number of ranks."""
        return len(self.shares)

    @property
    def own(self) -> RankShare:
        """The share of this rank."""
        return self.shares[self.tp_rank]

    @property
    def vocab_sizes(self) -> tuple[int, ...]:
        """Vocabulary rows of every rank, in rank order."""
        return tuple(share.vocab_rows.size for share in self.shares)


def make_partition(config: TransformerConfig, *, tp_size: int, tp_rank: int) -> Partition:
    """Split a model of this shape over `tp_size` ranks.

    Raises ConfigError (parallel.tensor_parallel_size) when there are more ranks than attention heads, ConfigError
    (model) when the query heads do not divide over the KV heads.
    """
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    if num_heads % num_kv_heads:
        raise ConfigError("model", f"{num_heads} attention heads do not divide over {num_kv_heads} KV heads")
    if tp_size > num_heads:
        raise ConfigError(
            "parallel.tensor_parallel_size",
            f"must be at most {num_heads}, the number of attention heads of this model, not {tp_size}",
        )
    heads = _split_heads(num_heads, num_kv_heads, tp_size)
    # Bytes of a rank in units of one MLP column (gate, up and down: 3 vectors of hidden_size): an attention head
    # has one vector of hidden_size per dimension in each of its projections.
    attention = [2 * config.head_dim * (queries.size + kv.size) for queries, kv in heads]
    columns = _fill_columns(config.intermediate_size, attention, vectors_per_column=3)
    rows = _split_vocabulary(config.vocab_size, tp_size)
    return Partition(
        tp_rank=tp_rank,
        shares=tuple(
            RankShare(query_heads=queries, kv_heads=kv, mlp_columns=mlp, vocab_rows=vocab)
            for (queries, kv), mlp, vocab in zip(heads, columns, rows, strict=True)
        ),
    )


def _split_heads(num_heads: int, num_kv_heads: int, tp_size: int) -> list[tuple[Span, Span]]:
    """Give each rank its (query heads, KV heads)."""
    group = num_heads // num_kv_heads
    if tp_size <= num_kv_heads:
        return [
            (Span(start=kv.start * group, size=kv.size * group), kv)
            for kv in _spans(_even(num_kv_heads, tp_size))
        ]
    heads: list[tuple[Span, Span]] = []
    for kv_head, num_ranks in enumerate(_even(tp_size, num_kv_heads)):
        for part in _spans(_even(group, num_ranks)):
            queries = Span(start=kv_head * group + part.start, size=part.size)
            heads.append((queries, Span(start=kv_head, size=1)))
    return heads


def _fill_columns(num_columns: int, loads: list[int], *, vectors_per_column: int) -> list[Span]:
    """Hand out columns, always to the rank that holds least, so that all end with about the same bytes."""
    unit = math.gcd(num_columns, MLP_UNIT)
    sizes = [0] * len(loads)
    queue = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(queue)
    for _ in range(num_columns // unit):
        load, rank = queue[0]
        sizes[rank] += unit
        heapq.heapreplace(queue, (load + unit * vectors_per_column, rank))
    return _spans(sizes)


def _split_vocabulary(vocab_size: int, tp_size: int) -> list[Span]:
    units = _even(-(-vocab_size // VOCAB_UNIT), tp_size)
    # The last unit may be cut short by the end of the vocabulary.
    rows = _spans([num_units * VOCAB_UNIT for num_units in units])
    starts = [min(span.start, vocab_size) for span in rows]
    return [
        Span(start=start, size=min(span.stop, vocab_size) - start)
        for start, span in zip(starts, rows, strict=True)
    ]


def _even(total: int, parts: int) -> list[int]:
    """Cut `total` into sizes that differ by at most one, larger ones first."""
    base, extra = divmod(total, parts)
    return [base + (index < extra) for index in range(parts)]


def _spans(sizes: list[int]) -> list[Span]:
    spans: list[Span] = []
    start = 0
    for size in sizes:
        spans.append(Span(start=start, size=size))
        start += size
    return spans
