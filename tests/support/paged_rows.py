"""Rows over a paged KV cache for the kernels of attention, poisoned wherever none may look, and what they must give."""

import math
from dataclasses import dataclass

import torch

POISON_BLOCK = 1 << 30
"""An entry of a block table that nobody may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """Rows of `query_lens` new tokens at the end of `kv_lens` tokens, scattered over blocks.

    Everything that holds no token is NaN: the rest of a row's last block, unused blocks, blocks before its window.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    query_lens: tuple[int, ...]
    kv_lens: torch.Tensor
    window: int | None

    @property
    def query_starts(self) -> torch.Tensor:
        """[num_rows + 1] int32."""
        lens = torch.tensor([0, *self.query_lens], dtype=torch.int32)
        return lens.cumsum(0).to(torch.int32).to(self.q.device)

    @property
    def scale(self) -> float:
        """Of the scores."""
        return 1.0 / math.sqrt(self.q.shape[2])

    def expected(self) -> torch.Tensor:
        """One plain softmax for each query, in float64: [num_tokens, num_heads, head_size]; padding gives NaN."""
        results = []
        block_size = self.k_cache.shape[1]
        starts = self.query_starts.tolist()
        group = self.q.shape[1] // self.k_cache.shape[2]
        for row, (query_len, kv_len) in enumerate(zip(self.query_lens, self.kv_lens.tolist(), strict=True)):
            for offset in range(query_len):
                q = self.q[starts[row] + offset].double()
                position = kv_len - query_len + offset
                if position < 0:
                    results.append(torch.full_like(q, math.nan))
                    continue
                first = 0 if self.window is None else max(0, position - self.window + 1)
                keys = torch.arange(first, position + 1, device=self.q.device)
                blocks = self.block_tables[row].index_select(0, keys // block_size).long()
                k, v = (
                    cache[blocks, keys % block_size].double().repeat_interleave(group, dim=1)
                    for cache in (self.k_cache, self.v_cache)
                )
                scores = torch.einsum("hd,khd->hk", q, k) * self.scale
                results.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
        return torch.stack(results)


def make_paged_rows(
    lens: list[tuple[int, int]],
    *,
    num_kv_heads: int,
    group: int,
    head_size: int,
    block_size: int,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    is_head_major: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> PagedRows:
    """Scatter rows of (new tokens, tokens in all); (1, 0) is a row of padding.

    is_head_major: a block holds its tokens head by head, as on a GPU; else token by token
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-kv_len // block_size) for _, kv_len in lens]
    num_blocks = 1 + sum(counts) + 3
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    tables = torch.full((len(lens), max(counts) + 2), POISON_BLOCK, dtype=torch.int32)
    caches = []
    for _ in range(2):
        if is_head_major:
            cache = torch.full((num_blocks, num_kv_heads, block_size, head_size), math.nan, dtype=dtype)
            caches.append(cache.transpose(1, 2))
        else:
            caches.append(
                torch.full((num_blocks, block_size, num_kv_heads, head_size), math.nan, dtype=dtype)
            )
    for row, (query_len, kv_len) in enumerate(lens):
        first_seen = 0 if window is None else max(0, kv_len - query_len - window + 1)
        for index in range(first_seen // block_size, counts[row]):
            block = tables[row, index] = free.pop()
            begin, end = max(first_seen - index * block_size, 0), min(block_size, kv_len - index * block_size)
            for cache in caches:
                tokens = torch.randn((end - begin, num_kv_heads, head_size), generator=generator)
                cache[block, begin:end] = tokens.to(dtype)
    q = torch.randn((sum(new for new, _ in lens), num_kv_heads * group, head_size), generator=generator).to(
        dtype
    )
    k_cache, v_cache = (cache.to(device) for cache in caches)
    return PagedRows(
        q=q.to(device),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables.to(device),
        query_lens=tuple(new for new, _ in lens),
        kv_lens=torch.tensor([kv_len for _, kv_len in lens], dtype=torch.int32, device=device),
        window=window,
    )
