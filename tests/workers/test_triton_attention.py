"""The attention kernels over odd shapes against one plain softmax for each query; on a card where there is one."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from phalanx.workers.kernels.decode_attention import DecodeScratch, DecodeTuning, decode_attention
from phalanx.workers.kernels.prefill_attention import prefill_attention
from phalanx.workers.kernels.single_row_attention import single_row_attention, splits_for
from support.kernel_device import DEVICE, HAS_CARD, NARROW, relative_error, tolerance
from support.paged_rows import PagedRows, make_paged_rows

EXAMPLES = 30 if HAS_CARD else 3
WITHOUT_SHRINKING = settings(max_examples=EXAMPLES, deadline=None, phases=[Phase.explicit, Phase.generate])
"""The interpreter takes a second for each example, and minutes to shrink one."""


def decode(rows: PagedRows, tuning: DecodeTuning) -> torch.Tensor:
    _, num_heads, head_size = rows.q.shape
    scratch = DecodeScratch(
        max_rows=len(rows.query_lens),
        num_heads=num_heads,
        num_kv_heads=rows.k_cache.shape[2],
        head_size=head_size,
        tuning=tuning,
        device=rows.q.device,
    )
    scratch.accumulated.fill_(torch.nan)
    scratch.softmax.fill_(torch.nan)
    results = []
    # Twice: the second call finds what the first has left in the scratch memory.
    for _ in range(2):
        out = torch.full_like(rows.q, torch.nan)
        decode_attention(
            rows.q, rows.k_cache, rows.v_cache, rows.block_tables, rows.kv_lens, scratch,
            scale=rows.scale, window=rows.window, out=out,
        )  # fmt: skip
        assert not scratch.arrived.any()
        results.append(out)
    torch.testing.assert_close(results[0], results[1], rtol=0.0, atol=0.0, equal_nan=True)
    return results[0]


def check_decode(rows: PagedRows, tuning: DecodeTuning) -> None:
    result, expected = decode(rows, tuning), rows.expected()
    is_real = rows.kv_lens > 0
    assert result[~is_real].isnan().all(), "padding was written"
    if is_real.any():
        assert relative_error(result[is_real], expected[is_real]) < tolerance(rows.q.dtype)


def check_prefill(rows: PagedRows) -> None:
    out = prefill_attention(
        rows.q, rows.k_cache, rows.v_cache, rows.block_tables, rows.kv_lens, rows.query_starts,
        max_query_len=max(rows.query_lens), scale=rows.scale, window=rows.window,
    )  # fmt: skip
    assert relative_error(out, rows.expected()) < tolerance(rows.q.dtype)


def near_edges(block_size: int, most: int) -> st.SearchStrategy[int]:
    """Lengths that end just before, at or after the end of a block, and any others."""
    edges = [block_size * count + off for count in (1, 2, 3) for off in (-1, 0, 1)]
    return st.one_of(st.integers(1, most), st.sampled_from([edge for edge in edges if 0 < edge]))


@st.composite
def decode_cases(draw: st.DrawFn) -> tuple[PagedRows, DecodeTuning]:
    block_size = draw(st.sampled_from([16, 64, 128]))
    lens = draw(st.lists(st.one_of(st.just(0), near_edges(block_size, 300)), min_size=1, max_size=5))
    tuning = DecodeTuning(tile=draw(st.sampled_from([16, 64])), num_programs=draw(st.integers(1, 24)))
    rows = make_paged_rows(
        [(1, kv_len) for kv_len in lens],
        num_kv_heads=draw(st.sampled_from([1, 2, 3])),
        group=draw(st.sampled_from([1, 2, 3, 7, 16])),
        head_size=draw(st.sampled_from([64, 80, 128])),
        block_size=block_size,
        window=draw(st.one_of(st.none(), st.integers(1, 200))),
        dtype=draw(st.sampled_from([torch.float32, NARROW])),
        is_head_major=draw(st.booleans()),
        device=DEVICE,
        seed=draw(st.integers(0, 1000)),
    )
    return rows, tuning


@WITHOUT_SHRINKING
@given(case=decode_cases())
def test_decode_is_a_softmax_over_the_tokens_that_a_row_sees(case: tuple[PagedRows, DecodeTuning]) -> None:
    check_decode(*case)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_size"),
    [
        (1, 64, 256),
        (4, 8, 64),
        *(
            pytest.param(kv_heads, group, head_size, marks=pytest.mark.full)
            for kv_heads, group in [(64, 1), (1, 64), (8, 2), (4, 8)]
            for head_size in (64, 128, 256)
        ),
    ],
)
def test_decode_takes_any_number_of_heads(kv_heads: int, group: int, head_size: int) -> None:
    rows = make_paged_rows([(1, 65), (1, 1)], num_kv_heads=kv_heads, group=group, head_size=head_size,
                           block_size=64, device=DEVICE)  # fmt: skip

    check_decode(rows, DecodeTuning.for_heads(head_size, torch.float32, num_programs=11))


def test_a_row_spread_over_many_programs_is_put_together() -> None:
    rows = make_paged_rows(
        [(1, 20 * 16 - 1)], num_kv_heads=1, group=2, head_size=64, block_size=16, device=DEVICE
    )

    check_decode(rows, DecodeTuning(tile=16, num_programs=24))


@st.composite
def single_row_cases(draw: st.DrawFn) -> tuple[PagedRows, int]:
    block_size = draw(st.sampled_from([16, 64]))
    rows = make_paged_rows(
        [
            (1, draw(st.one_of(st.just(0), near_edges(block_size, 400))))
            for _ in range(draw(st.integers(1, 2)))
        ],
        num_kv_heads=draw(st.sampled_from([1, 2, 3])),
        group=draw(st.sampled_from([1, 2, 3, 8])),
        head_size=draw(st.sampled_from([64, 80, 128])),
        block_size=block_size,
        dtype=draw(st.sampled_from([torch.float32, NARROW])),
        is_head_major=draw(st.booleans()),
        device=DEVICE,
        seed=draw(st.integers(0, 1000)),
    )
    return rows, draw(st.sampled_from([2, 4, 16]))


@WITHOUT_SHRINKING
@given(case=single_row_cases())
def test_a_single_row_is_a_softmax_over_all_its_tokens(case: tuple[PagedRows, int]) -> None:
    rows, splits = case
    num_rows, num_heads, head_size = rows.q.shape
    num_kv_heads, tile = rows.k_cache.shape[2], min(64, rows.k_cache.shape[1])
    scratch = DecodeScratch(
        max_rows=num_rows, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size,
        tuning=DecodeTuning(tile=tile, num_programs=num_rows * num_kv_heads * splits), device=DEVICE,
    )  # fmt: skip
    scratch.accumulated.fill_(torch.nan)
    scratch.softmax.fill_(torch.nan)

    for _ in range(2):
        out = torch.full_like(rows.q, torch.nan)
        single_row_attention(
            rows.q, rows.k_cache, rows.v_cache, rows.block_tables, rows.kv_lens, scratch,
            splits=splits, scale=rows.scale, out=out,
        )  # fmt: skip

        is_real = rows.kv_lens > 0
        assert out[~is_real].isnan().all(), "padding was written"
        if is_real.any():
            assert relative_error(out[is_real], rows.expected()[is_real]) < tolerance(rows.q.dtype)
        assert not scratch.arrived.any()


@pytest.mark.parametrize(
    ("num_rows", "num_heads", "num_kv_heads", "head_size", "block_size", "splits"),
    [
        (1, 16, 8, 128, 64, 16),
        (1, 32, 4, 128, 64, 16),
        (1, 32, 32, 128, 64, 4),
        (1, 16, 1, 256, 64, 4),
        (1, 64, 64, 128, 64, 2),
        (1, 16, 8, 128, 16, 0),
        (16, 16, 8, 128, 64, 0),
    ],
)
def test_the_parts_of_a_single_row_fill_the_card_and_fit_into_registers(
    num_rows: int, num_heads: int, num_kv_heads: int, head_size: int, block_size: int, splits: int
) -> None:
    scratch = DecodeScratch(
        max_rows=num_rows, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size,
        tuning=DecodeTuning(), device=torch.device("cpu"),
    )  # fmt: skip

    found = splits_for(
        scratch, num_rows=num_rows, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size,
        block_size=block_size,
    )  # fmt: skip

    assert found == splits
    assert found * num_rows * num_kv_heads <= scratch.accumulated.shape[0]


@st.composite
def prefill_cases(draw: st.DrawFn) -> PagedRows:
    block_size = draw(st.sampled_from([16, 64]))
    query_lens = draw(st.lists(near_edges(block_size, 140 if HAS_CARD else 40), min_size=1, max_size=3))
    return make_paged_rows(
        [(new, new + draw(st.one_of(st.just(0), st.integers(0, 150)))) for new in query_lens],
        num_kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 3])),
        head_size=draw(st.sampled_from([64, 80, 128])),
        block_size=block_size,
        window=draw(st.one_of(st.none(), st.integers(1, 150))),
        dtype=draw(st.sampled_from([torch.float32, NARROW])),
        is_head_major=draw(st.booleans()),
        device=DEVICE,
        seed=draw(st.integers(0, 1000)),
    )


@WITHOUT_SHRINKING
@given(rows=prefill_cases())
def test_prefill_is_a_softmax_over_the_tokens_that_a_query_sees(rows: PagedRows) -> None:
    check_prefill(rows)


@pytest.mark.full
def test_prefill_takes_heads_of_256() -> None:
    check_prefill(
        make_paged_rows(
            [(3, 70), (65, 65)], num_kv_heads=1, group=1, head_size=256, block_size=64, device=DEVICE
        )
    )
