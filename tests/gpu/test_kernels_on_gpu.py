"""What only a card can show of the kernels: bfloat16 at the sizes of real models, and CUDA graphs.

The odd shapes are in tests/workers/test_triton_*.py, which run compiled where there is a card.
"""

import pytest
import torch

from phalanx.workers.kernels.decode_attention import DecodeScratch, DecodeTuning, decode_attention
from phalanx.workers.kernels.single_row_attention import single_row_attention, splits_for
from support.kernel_device import relative_error, tolerance
from support.paged_rows import make_paged_rows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

LENS = [1, 63, 64, 65, 1000, 4096, 511, 0, 2048, 127, 128, 129]


@pytest.mark.parametrize(("kv_heads", "group"), [(8, 2), (8, 4), (4, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1000])
def test_a_graph_replays_decode_for_other_lengths(
    kv_heads: int, group: int, dtype: torch.dtype, window: int | None
) -> None:
    rows = make_paged_rows([(1, 4097)] * len(LENS), num_kv_heads=kv_heads, group=group, head_size=128,
                           block_size=64, dtype=dtype, window=window, device="cuda")  # fmt: skip
    scratch = DecodeScratch(max_rows=len(LENS), num_heads=kv_heads * group, num_kv_heads=kv_heads, head_size=128,
                            tuning=DecodeTuning(), device=rows.q.device)  # fmt: skip
    out = torch.full_like(rows.q, torch.nan)

    def attend() -> None:
        decode_attention(rows.q, rows.k_cache, rows.v_cache, rows.block_tables, rows.kv_lens, scratch,
                         scale=rows.scale, window=window, out=out)  # fmt: skip

    attend()
    assert relative_error(out, rows.expected()) < tolerance(dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    out.fill_(torch.nan)
    graph.replay()
    assert relative_error(out, rows.expected()) < tolerance(dtype)
    if window is not None:  # shorter rows would see what was poisoned as being before the window
        return

    for _ in range(3):
        rows.kv_lens.copy_(torch.tensor(LENS, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        is_real = rows.kv_lens > 0
        assert out[~is_real].isnan().all()
        assert relative_error(out[is_real], rows.expected()[is_real]) < tolerance(dtype)


@pytest.mark.parametrize(("kv_heads", "group"), [(8, 2), (8, 4), (4, 8), (32, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_replays_a_single_row_for_other_lengths(
    kv_heads: int, group: int, dtype: torch.dtype
) -> None:
    rows = make_paged_rows(
        [(1, 4097)],
        num_kv_heads=kv_heads,
        group=group,
        head_size=128,
        block_size=64,
        dtype=dtype,
        device="cuda",
    )
    tuning = DecodeTuning.for_heads(128, dtype, num_programs=264)
    scratch = DecodeScratch(max_rows=1, num_heads=kv_heads * group, num_kv_heads=kv_heads, head_size=128,
                            tuning=tuning, device=rows.q.device)  # fmt: skip
    splits = splits_for(scratch, num_rows=1, num_heads=kv_heads * group, num_kv_heads=kv_heads, head_size=128,
                        block_size=64)  # fmt: skip
    out = torch.full_like(rows.q, torch.nan)

    def attend() -> None:
        single_row_attention(rows.q, rows.k_cache, rows.v_cache, rows.block_tables, rows.kv_lens, scratch,
                             splits=splits, scale=rows.scale, out=out)  # fmt: skip

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for kv_len in (4097, *LENS):
        rows.kv_lens.fill_(kv_len)
        out.fill_(torch.nan)
        graph.replay()
        if kv_len:
            assert relative_error(out, rows.expected()) < tolerance(dtype)
        else:
            assert out.isnan().all()
