"""The attention backends: two kinds of rows in two calls, and what the flash-attention packages are asked."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.workers.attention.backend import AttentionShape
from phalanx.workers.attention.choose import choose_attention_backend
from phalanx.workers.attention.flash_attention import FlashAttention2, FlashAttention3
from phalanx.workers.attention.triton_backend import TritonAttention
from phalanx.workers.paged_rows import PagedRows as StepPagedRows
from support.kernel_device import DEVICE, relative_error, tolerance
from support.paged_rows import PagedRows, make_paged_rows


def step_rows(rows: PagedRows) -> StepPagedRows:
    num_decode = sum(query_len == 1 for query_len in rows.query_lens)
    return StepPagedRows(
        num_rows=len(rows.query_lens),
        num_decode_rows=num_decode,
        prompt_starts=rows.query_starts[num_decode:],
        kv_lens=rows.kv_lens,
        block_tables=(torch.full_like(rows.block_tables, -1), rows.block_tables),
        max_query_len=max(rows.query_lens),
        max_kv_len=int(rows.kv_lens.max()),
    )


def shape_of(rows: PagedRows) -> AttentionShape:
    return AttentionShape(
        num_heads=rows.q.shape[1],
        num_kv_heads=rows.k_cache.shape[2],
        head_size=rows.q.shape[2],
        block_size=rows.k_cache.shape[1],
        max_rows=8,
        dtype=rows.q.dtype,
        device=rows.q.device,
    )


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, kv_lens: torch.Tensor,
    starts: torch.Tensor, scale: float, window_size: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """What a flash-attention package computes, by the support's plain softmax."""
    assert math.isclose(scale, q.shape[2] ** -0.5)
    begin, end = int(starts[0]), int(starts[-1])
    rows = PagedRows(
        q=q[begin:end],
        k_cache=k,
        v_cache=v,
        block_tables=table,
        query_lens=tuple(starts.diff().tolist()),
        kv_lens=kv_lens,
        window=None if window_size == (-1, -1) else window_size[0] + 1,
    )
    result = torch.full_like(q, math.nan)
    result[begin:end] = rows.expected().to(q.dtype)
    return result


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
    page_table: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    assert causal
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    return reference(q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, softmax_scale, window_size)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float, causal: bool, window_size: tuple[int, int],
    block_table: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    kv_lens = cu_seqlens_k.diff()
    assert causal
    assert cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_k >= int(kv_lens.max())
    return reference(q, k, v, block_table, kv_lens, cu_seqlens_q, softmax_scale, window_size)


FLASH_3: Any = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
FLASH_2: Any = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
BACKENDS = {
    "triton": TritonAttention,
    "flash-attention-3": lambda shape: FlashAttention3(shape, FLASH_3),
    "flash-attention-2": lambda shape: FlashAttention2(shape, FLASH_2),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "lens",
    [
        pytest.param([(1, 20), (1, 0), (1, 33)], id="decode"),
        pytest.param([(5, 5), (17, 40)], id="prompts", marks=pytest.mark.full),
        pytest.param([(1, 20), (1, 48), (20, 31), (3, 3)], id="mixed"),
    ],
)
@pytest.mark.parametrize("window", [None, 9])
def test_a_step_of_both_kinds_of_rows(name: str, lens: list[tuple[int, int]], window: int | None) -> None:
    rows = make_paged_rows(
        lens, num_kv_heads=2, group=2, head_size=64, block_size=16, window=window, device=DEVICE
    )
    backend = BACKENDS[name](shape_of(rows))

    result = backend.attend(
        rows.q, rows.k_cache, rows.v_cache, step_rows(rows), 1, scale=rows.scale, window=window
    )

    expected = rows.expected()
    is_real = ~expected.isnan().any(-1).any(-1)
    assert backend.name == name
    assert relative_error(result[is_real], expected[is_real]) < tolerance(torch.float32)


@pytest.mark.parametrize("window", [None, 9])
def test_a_recorded_step_has_rows_and_tokens_of_padding(window: int | None) -> None:
    rows = make_paged_rows(
        [(1, 20), (20, 31), (3, 3)],
        num_kv_heads=2,
        group=2,
        head_size=64,
        block_size=16,
        window=window,
        device=DEVICE,
    )
    q = torch.nn.functional.pad(rows.q, (0, 0, 0, 0, 0, 6), value=math.nan)
    # Room for five decoding rows and four prompts.
    places = torch.tensor([0, 5, 6])
    kv_lens = torch.zeros(9, dtype=torch.int32)
    kv_lens[places] = rows.kv_lens.cpu()
    tables = torch.full((9, rows.block_tables.shape[1]), -1, dtype=torch.int32, device=DEVICE)
    tables[places] = rows.block_tables
    padded = StepPagedRows(
        num_rows=9,
        num_decode_rows=5,
        prompt_starts=torch.tensor([1, 21, 24, 24, 24], dtype=torch.int32, device=DEVICE),
        kv_lens=kv_lens.to(DEVICE),
        block_tables=(tables,),
        max_query_len=30,
        max_kv_len=1000,
    )

    result = TritonAttention(shape_of(rows)).attend(
        q, rows.k_cache, rows.v_cache, padded, 0, scale=rows.scale, window=window
    )

    assert relative_error(result[:24], rows.expected()) < tolerance(torch.float32)


def test_a_cpu_has_plain_torch() -> None:
    rows = make_paged_rows([(1, 1)], num_kv_heads=1, group=1, head_size=64, block_size=16)

    assert choose_attention_backend(shape_of(rows)) is None
