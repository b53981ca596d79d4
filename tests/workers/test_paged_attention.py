"""Paged attention over odd shapes against one plain softmax for each query."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.workers import forward_context
from phalanx.workers.forward_context import ForwardContext, StepRows, build_forward_context
from phalanx.workers.kernels.kv_cache import write_kv
from phalanx.workers.kernels.paged_attention import paged_attention

CPU = torch.device("cpu")
HEAD_SIZE = 8


class Step:
    """Random rows of the given (new tokens, computed tokens), scattered over a poisoned cache."""

    def __init__(
        self,
        lens: list[tuple[int, int]],
        *,
        kv_heads: int,
        group: int,
        block_size: int,
        seed: int,
        window: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lens, self.group, self.block_size, self.window = lens, group, block_size, window
        blocks_needed = [-(-(new + computed) // block_size) for new, computed in lens]
        num_blocks = 1 + sum(blocks_needed) + 3
        shuffled = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        self.tables = np.zeros((len(lens), max(blocks_needed)), dtype=np.int64)
        for row, count in enumerate(blocks_needed):
            self.tables[row, :count] = [shuffled.pop() for _ in range(count)]
        shape = (num_blocks, block_size, kv_heads, HEAD_SIZE)
        self.k_cache, self.v_cache = (torch.full(shape, torch.nan) for _ in range(2))
        self.k_cache[0] = self.v_cache[0] = 0.0
        # [tokens of the row, kv_heads, HEAD_SIZE] for each row
        self.keys, self.values = (
            [torch.randn(new + computed, kv_heads, HEAD_SIZE, generator=generator) for new, computed in lens]
            for _ in range(2)
        )
        num_tokens = sum(new for new, _ in lens)
        self.q = torch.randn(num_tokens, kv_heads * group, HEAD_SIZE, generator=generator)
        for row, (_, computed) in enumerate(lens):
            slots = self._slots(row, computed)
            write_kv(
                self.keys[row][:computed], self.values[row][:computed], self.k_cache, self.v_cache, slots
            )

    def _slots(self, row: int, count: int) -> torch.Tensor:
        positions = np.arange(count)
        blocks = self.tables[row, positions // self.block_size]
        return torch.from_numpy(blocks * self.block_size + positions % self.block_size)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (None, self.window)

    def context(self) -> ForwardContext:
        rows = StepRows(
            query_lens=np.array([new for new, _ in self.lens]),
            kv_lens=np.array([new + computed for new, computed in self.lens]),
            block_tables=np.stack([self.tables] * 2),
            block_size=self.block_size,
        )
        return build_forward_context(rows, windows=self.windows, dtype=torch.float32, device=CPU)

    def attend(self) -> torch.Tensor:
        context = self.context()
        new_keys, new_values = (
            torch.cat([part[computed:] for part, (_, computed) in zip(parts, self.lens, strict=True)])
            for parts in (self.keys, self.values)
        )
        write_kv(new_keys, new_values, self.k_cache, self.v_cache, context.slot_mappings[1])
        return paged_attention(self.q, self.k_cache, self.v_cache, context.groups[1], scale=HEAD_SIZE**-0.5)

    def expected(self) -> torch.Tensor:
        results, token = [], 0
        for (new, computed), keys, values in zip(self.lens, self.keys, self.values, strict=True):
            for offset in range(new):
                seen = computed + offset + 1
                first = 0 if self.window is None else max(0, seen - self.window)
                k = keys[first:seen].repeat_interleave(self.group, dim=1)
                v = values[first:seen].repeat_interleave(self.group, dim=1)
                scores = torch.einsum("hd,khd->hk", self.q[token], k) * HEAD_SIZE**-0.5
                results.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
                token += 1
        return torch.stack(results)


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(
        st.tuples(st.one_of(st.just(1), st.integers(1, 45)), st.one_of(st.just(0), st.integers(0, 70))),
        min_size=1,
        max_size=7,
    ),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    block_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 1000),
    window=st.one_of(st.none(), st.integers(1, 90)),
)
def test_attention_is_a_softmax_over_the_tokens_that_a_query_sees(
    lens: list[tuple[int, int]], kv_heads: int, group: int, block_size: int, seed: int, window: int | None
) -> None:
    step = Step(lens, kv_heads=kv_heads, group=group, block_size=block_size, seed=seed, window=window)

    torch.testing.assert_close(step.attend(), step.expected(), atol=1e-5, rtol=1e-4)


def test_decode_of_many_rows_takes_few_calls() -> None:
    step = Step([(1, 20 + 3 * row) for row in range(40)], kv_heads=1, group=2, block_size=16, seed=0)

    groups = step.context().groups[0]

    assert len(groups) <= 4
    assert sum(group.num_rows for group in groups) == 40


def test_rows_that_all_decode_are_one_group_in_the_order_of_the_step() -> None:
    decode = Step([(1, 20 + row) for row in range(8)], kv_heads=2, group=3, block_size=16, seed=0)
    mixed = Step([(40, 0), (1, 20), (1, 21)], kv_heads=2, group=3, block_size=16, seed=0)

    (group,) = decode.context().groups[0]

    assert group.is_whole
    assert not any(group.is_whole for group in mixed.context().groups[0])
    assert group.head_index(2, 3) is group.head_index(2, 3)


def test_a_row_whose_blocks_lie_side_by_side_is_read_in_place() -> None:
    step = Step([(1, 40)], kv_heads=1, group=1, block_size=16, seed=0)
    step.tables[0] = [3, 4, 5]

    (group,) = step.context().groups[0]

    assert group.slot_range == 48
    assert group.mask is None


def test_a_window_reads_no_more_keys_than_its_queries_see() -> None:
    step = Step([(1, 300), (1, 200), (4, 50)], kv_heads=1, group=1, block_size=16, seed=0, window=20)

    groups = step.context().groups

    assert sorted(group.kv_len for group in groups[1]) == [20, 23]
    assert all(group.mask is None for group in groups[1] if group.query_len == 1)
    torch.testing.assert_close(step.attend(), step.expected(), atol=1e-5, rtol=1e-4)


def test_a_step_within_the_window_is_laid_out_once() -> None:
    step = Step([(1, 30), (5, 0)], kv_heads=1, group=1, block_size=16, seed=0, window=31)

    groups = step.context().groups

    assert [group.mask is of_window.mask for group, of_window in zip(*groups, strict=True)] == [True, True]
    assert [len(group.slots) for group in groups[0]] == [len(group.slots) for group in groups[1]]


def test_a_large_group_is_cut_into_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_context, "MAX_GATHERED_SLOTS", 64)
    step = Step([(1, 29)] * 5, kv_heads=2, group=1, block_size=4, seed=4)

    assert [group.num_rows for group in step.context().groups[0]] == [2, 2, 1]
    torch.testing.assert_close(step.attend(), step.expected(), atol=1e-5, rtol=1e-4)
