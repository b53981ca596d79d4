"""The one interface of attention over a paged KV cache on a GPU, and what implementations share.

Called by: layers/attention.py, once per layer and step, after keys and values are stored, on the worker's main thread.
workers/attention/choose.py says which implementation a rank uses. Nothing here waits for the device.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..paged_rows import PagedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What a rank's attention layers have in common. num_heads, num_kv_heads: of this rank; max_rows: of a step."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    max_rows: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCache:
    """What some rows of a step see of one layer's cache.

    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_size], of any strides but the last, which is 1
    block_tables:     [num_rows, max_blocks] int32, of these rows; kv_lens: [num_rows] int32, 0 for padding. On a GPU
                      both were written before the kernel that was launched last (kernels/dependent_launch.py)
    scale:            of the products of queries and keys
    window:           tokens that a query sees at most, itself among them; None: all
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    kv_lens: torch.Tensor
    scale: float
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLens:
    """Where the new tokens of a prefill's rows stand. query_starts: [num_rows + 1] int32, on the device."""

    query_starts: torch.Tensor
    max_query_len: int
    max_kv_len: int


class AttentionBackend(ABC):
    """Two calls a layer: one for the rows with one new token, one for the others.

    max_recorded_tokens: a CUDA graph may hold a `prefill` of so many tokens, which then is launched for the longest and
                         most rows that there may be; 0: none
    """

    name: ClassVar[str]
    max_recorded_tokens: ClassVar[int]

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        rows: PagedRows,
        group: int,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Attend from every new token to the tokens of its row that it sees, up to itself.

        q:       [num_tokens, num_heads, head_size], contiguous; heads that share a KV head lie side by side
        group:   the KV cache group, whose block table is read
        returns  like q; what stands in rows of padding is undefined
        The others are as in `SeenCache`.
        """
        num_decode = rows.num_decode_rows

        def seen_by(part: slice) -> SeenCache:
            return SeenCache(
                k_cache=k_cache,
                v_cache=v_cache,
                block_tables=rows.block_tables[group][part],
                kv_lens=rows.kv_lens[part],
                scale=scale,
                window=window,
            )

        if num_decode == rows.num_rows:
            out = torch.empty_like(q)
        else:
            # First, for not every package writes where it is told; decoding rows then fill in what is theirs.
            out = self.prefill(
                q,
                seen_by(slice(num_decode, rows.num_rows)),
                PromptLens(
                    query_starts=rows.prompt_starts,
                    max_query_len=rows.max_query_len,
                    max_kv_len=rows.max_kv_len,
                ),
            )
        if num_decode:
            self.decode(q[:num_decode], seen_by(slice(num_decode)), out[:num_decode])
        return out

    @abstractmethod
    def decode(self, q: torch.Tensor, seen: SeenCache, out: torch.Tensor) -> None:
        """Write `out` for rows with one new token each; its launches depend on no length, so a graph may hold them.

        Where a row's kv_len is 0, `out` is left alone: the token of a prompt may stand there.
        """
        ...

    @abstractmethod
    def prefill(self, q: torch.Tensor, seen: SeenCache, lens: PromptLens) -> torch.Tensor:
        """Compute rows with any number of new tokens, which stand somewhere in q.

        Returns like q, a tensor of its own; what stands where no token of these rows is, is undefined.
        """
        ...
