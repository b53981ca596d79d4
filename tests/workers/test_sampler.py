"""The sampler against a plain oracle in float64."""

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.workers.noise import gumbel_rows
from phalanx.workers.sampler import SamplingBatch, _thresholds, sample


def make_batch(
    num_rows: int,
    *,
    temperatures: list[float] | None = None,
    top_ks: list[int] | None = None,
    top_ps: list[float] | None = None,
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
    banned: list[tuple[int, int]] | None = None,
) -> SamplingBatch:
    temperatures = temperatures or [1.0] * num_rows
    top_ks = top_ks or [0] * num_rows
    top_ps = top_ps or [1.0] * num_rows
    return SamplingBatch(
        temperatures=torch.tensor(temperatures),
        top_ks=torch.tensor(top_ks),
        top_ps=torch.tensor(top_ps),
        seeds=torch.tensor(seeds or list(range(num_rows))),
        positions=torch.tensor(positions or [0] * num_rows),
        banned_row_index=torch.tensor([row for row, _ in banned]) if banned else None,
        banned_token_ids=torch.tensor([token for _, token in banned]) if banned else None,
        all_greedy=not any(temperatures),
        any_filtered=any(top_ks) or any(top_p < 1 for top_p in top_ps),
    )


def kept_by_oracle(row: npt.NDArray[np.float64], top_k: int, top_p: float) -> set[int]:
    """Ids that top-k and then top-p leave; ties stay."""
    kept = np.ones(row.size, dtype=bool)
    if 0 < top_k < row.size:
        kept &= row >= np.sort(row)[-top_k]
    mass = np.where(kept, np.exp(row - row.max()), 0.0)
    mass /= mass.sum()
    if top_p < 1.0:
        order = np.argsort(-mass, kind="stable")
        before = np.cumsum(mass[order]) - mass[order]
        inside = before < top_p - 1e-6
        inside[0] = True
        kept &= row >= row[order[inside]].min()
    return set(np.flatnonzero(kept).tolist())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.sampled_from([5, 64, 700, 3000]),
    scale=st.sampled_from([0.0, 0.3, 3.0, 12.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 300, 2999, 10**6]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.03]),
    rounded=st.booleans(),
)
def test_the_filters_keep_what_the_oracle_keeps(
    seed: int, vocab_size: int, scale: float, top_k: int, top_p: float, rounded: bool
) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(3, vocab_size)) * scale
    logits = logits.round(1).astype(np.float32) if rounded else logits.astype(np.float32)
    batch = make_batch(3, top_ks=[top_k, 0, top_k], top_ps=[top_p, top_p, 1.0])

    thresholds = _thresholds(torch.from_numpy(logits), batch).numpy()

    for row, k, p in ((0, top_k, top_p), (1, 0, top_p), (2, top_k, 1.0)):
        kept = set(np.flatnonzero(logits[row] >= thresholds[row]).tolist())
        expected = kept_by_oracle(logits[row].astype(np.float64), k, p)
        if not rounded and scale:
            assert kept == expected
        else:
            # With many equal values a mass may fall on top_p itself; then one level of ties is in doubt.
            levels = set(logits[row][sorted(kept ^ expected)].tolist())
            assert len(levels) <= 1


def test_a_nucleus_that_reaches_top_p_takes_no_further_token() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()

    thresholds = _thresholds(logits, make_batch(1, top_ps=[0.8]))

    assert (logits >= thresholds).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(("top_k", "top_p", "temperature"), [(0, 1.0, 1.0), (0, 1.0, 0.6), (5, 0.9, 1.3)])
def test_draws_follow_the_distribution(top_k: int, top_p: float, temperature: float) -> None:
    num_draws = 40_000
    logits = np.random.default_rng(3).normal(size=24).astype(np.float32) * 2
    scaled = logits.astype(np.float64) / temperature
    kept = sorted(kept_by_oracle(scaled, top_k, top_p))
    expected = np.zeros(24)
    expected[kept] = np.exp(scaled[kept] - scaled.max())
    expected /= expected.sum()
    batch = make_batch(
        num_draws,
        temperatures=[temperature] * num_draws,
        top_ks=[top_k] * num_draws,
        top_ps=[top_p] * num_draws,
        seeds=[17] * num_draws,
        positions=list(range(num_draws)),
    )

    tokens = sample(torch.from_numpy(logits).expand(num_draws, -1), batch).numpy()

    counts = np.bincount(tokens, minlength=24)
    assert 0.5 * np.abs(counts / num_draws - expected).sum() < 0.01
    often = expected * num_draws >= 5
    chi_square = (((counts - expected * num_draws) ** 2) / np.maximum(expected * num_draws, 1e-9))[
        often
    ].sum()
    degrees = int(often.sum()) - 1
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5
    assert counts[expected == 0].sum() == 0


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 1000, generator=generator) * torch.tensor([0.01, 1, 8] * 3).unsqueeze(-1)
    temperatures = [1.0, 0.0, 0.7] * 3
    top_ks = [0, 0, 0, 4, 4, 4, 0, 900, 900]
    top_ps = [1.0, 0.5, 0.9, 1.0, 0.9, 0.9, 0.3, 0.99, 1.0]
    whole = sample(logits, make_batch(9, temperatures=temperatures, top_ks=top_ks, top_ps=top_ps))

    for row in range(9):
        batch = make_batch(
            1,
            temperatures=[temperatures[row]],
            top_ks=[top_ks[row]],
            top_ps=[top_ps[row]],
            seeds=[row],
        )
        assert sample(logits[row : row + 1], batch).tolist() == [int(whole[row])]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])

    assert sample(logits, make_batch(2, temperatures=[0.0, 0.0])).tolist() == [1, 0]


def test_banned_tokens_are_never_drawn_and_the_logits_stay_as_they_are() -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0]]).repeat(200, 1)
    banned = [(row, 0) for row in range(200)]

    tokens = sample(logits, make_batch(200, temperatures=[0.0, 1.0] * 100, banned=banned))

    assert set(tokens.tolist()) == {1, 2}
    assert (logits[:, 0] == 9.0).all()


def test_leaving_out_hopeless_tokens_changes_no_draw() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(300, 512, generator=generator) * 6
    batch = make_batch(300)

    plain = (logits.double() + gumbel_rows(batch.seeds, batch.positions, 512)).argmax(dim=-1)

    assert torch.equal(sample(logits, batch), plain)


def test_a_grammar_masks_its_rows_before_anything_else_and_leaves_the_others_alone() -> None:
    logits = torch.tensor([[9.0, 5.0, 1.0, 0.0]]).repeat(3, 1)
    allowed = torch.tensor([[False, False, True, True], [False, True, True, False]])
    free = make_batch(3, temperatures=[0.0] * 3, banned=[(2, 1)])
    batch = dataclasses.replace(free, grammar_row_index=torch.tensor([0, 2]), grammar_allowed=allowed)

    assert sample(logits, batch).tolist() == [2, 0, 2]
    assert logits.tolist() == [[9.0, 5.0, 1.0, 0.0]] * 3
