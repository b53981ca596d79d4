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


class AttentionBackend(ABC):
    """Two calls a layer: one for the rows with one new token, one for the others."""

    name: ClassVar[str]

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

        q:                [num_tokens, num_heads, head_size], contiguous; heads that share a KV head lie side by side
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_size], of any strides but the last, which is 1
        group:            the KV cache group, whose block table is read
        window:           tokens that a query sees at most, itself among them; None: all
        returns           like q; what stands in rows of padding is undefined
        """
        num_decode, table = rows.num_decode_rows, rows.block_tables[group]
        out = torch.empty_like(q) if num_decode else None
        if out is not None:
            self.decode(
                q[:num_decode],
                k_cache,
                v_cache,
                table[:num_decode],
                rows.kv_lens[:num_decode],
                out[:num_decode],
                scale=scale,
                window=window,
            )
            if num_decode == rows.num_rows:
                return out
        of_prompts = self.prefill(
            q[num_decode:],
            k_cache,
            v_cache,
            table[num_decode : rows.num_rows],
            rows.kv_lens[num_decode : rows.num_rows],
            rows.prompt_starts,
            None if out is None else out[num_decode:],
            max_query_len=rows.max_query_len,
            max_kv_len=rows.max_kv_len,
            scale=scale,
            window=window,
        )
        # Nothing but prompts: what was written is all there is.
        return of_prompts if out is None else out

    @abstractmethod
    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        kv_lens: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> None:
        """Write `out` for rows with one new token each; its launches depend on no length, so a graph may hold them."""
        ...

    @abstractmethod
    def prefill(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        kv_lens: torch.Tensor,
        query_starts: torch.Tensor,
        out: torch.Tensor | None,
        *,
        max_query_len: int,
        max_kv_len: int,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Compute rows with any number of new tokens; query_starts: [num_rows + 1], from 0 on.

        Returns like q: `out`, written, when it is given.
        """
        ...
