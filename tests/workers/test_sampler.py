"""The sampler against a plain oracle in float64, and against itself alone, in batches, and in parts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.workers.config import LogprobsMode
from phalanx.workers.noise import gumbel_rows
from phalanx.workers.sampler import sample
from phalanx.workers.sampling_params import SamplingParams
from support.sampling_oracle import (
    Row,
    batch_of,
    dense,
    expect,
    hold,
    logits_of,
    new_request,
    random_row,
    run,
)

SIZE = 70


def make_row(logits: list[float], *, seed: int = 0, output: list[int] | None = None, **params: object) -> Row:
    return Row(
        logits=np.array(logits, dtype=np.float32),
        params=SamplingParams(max_tokens=None, **params),  # type: ignore[arg-type]
        seed=seed,
        output=output or [],
    )


def check_against_the_oracle(seed: int, num_rows: int) -> None:
    """Rows that ask for everything, in one batch: distribution, greedy token and raw numbers of each."""
    generator = np.random.default_rng(seed)
    rows = [random_row(generator, SIZE, logprobs=-1) for _ in range(num_rows)]
    processed = run(rows, mode=LogprobsMode.PROCESSED_LOGPROBS)
    plain = run(rows)
    assert torch.equal(plain.token_ids, processed.token_ids)
    for number, row in enumerate(rows):
        expected = expect(row)
        token_id = int(plain.token_ids[number])
        raw, found = dense(plain, number, SIZE), np.exp(dense(processed, number, SIZE))
        np.testing.assert_allclose(raw, expected.raw, atol=2e-5)
        if row.params.temperature == 0.0:
            assert token_id == expected.greedy or is_nearly_tied(row), (seed, number)
            continue
        assert found[token_id] > 0.0
        bounds = [expect(row, slack=slack).probabilities > 0 for slack in (-1e-5, 1e-5)]
        if (bounds[0] == bounds[1]).all() and not is_nearly_tied(row):
            np.testing.assert_allclose(found, expected.probabilities, atol=2e-5, err_msg=f"{seed} {number}")


def is_nearly_tied(row: Row) -> bool:
    """Rounded logits, moved by penalties: float32 and float64 may order two of them differently."""
    return bool((row.logits == row.logits.round(1)).all())


@pytest.mark.parametrize("seed", range(30))
def test_a_mixed_batch_is_what_the_oracle_says(seed: int) -> None:
    check_against_the_oracle(seed, 12)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_mixed_batches_are_what_the_oracle_says(seed: int) -> None:
    check_against_the_oracle(seed, 12)


@pytest.mark.parametrize(
    "off",
    [
        {"top_p": 1.0, "top_k": 0},
        {"min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
        {"temperature": 0.0},
        {"allowed_token_ids": None, "bad_words_token_ids": (), "logit_bias": {}, "min_tokens": 0},
        {
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "allowed_token_ids": None,
            "bad_words_token_ids": (),
            "logit_bias": {},
            "min_tokens": 0,
        },
    ],
)
def test_a_batch_that_skips_stages_gives_what_it_gives_beside_rows_that_need_them(
    off: dict[str, object],
) -> None:
    generator = np.random.default_rng(7)
    fast = [random_row(generator, SIZE, **off) for _ in range(20)]
    slow = [random_row(generator, SIZE, temperature=0.9, logprobs=3) for _ in range(20)]

    mixed = run([row for pair in zip(fast, slow, strict=True) for row in pair]).token_ids[::2]

    assert torch.equal(run(fast).token_ids, mixed)


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    generator = np.random.default_rng(0)
    rows = [random_row(generator, 1000, logprobs=2) for _ in range(24)]
    whole = run(rows)

    for number, row in enumerate(rows):
        alone = run([row])
        assert int(alone.token_ids[0]) == int(whole.token_ids[number])
        assert torch.equal(alone.logprobs[0].token_ids[0], whole.logprobs[0].token_ids[number])
        assert torch.equal(alone.logprobs[0].values[0], whole.logprobs[0].values[number])


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([5, 64, 700, 3000]),
    scale=st.sampled_from([0.3, 3.0, 12.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 300, 2999, 10**6]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.03]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_filters_of_long_rows_keep_what_the_oracle_keeps(
    seed: int, size: int, scale: float, top_k: int, top_p: float, min_p: float
) -> None:
    generator = np.random.default_rng(seed)
    rows = [
        make_row(generator.normal(size=size) * scale, top_k=k, top_p=p, min_p=m, logprobs=-1)
        for k, p, m in ((top_k, top_p, min_p), (0, top_p, 0.0), (top_k, 1.0, min_p))
    ]

    processed = run(rows, mode=LogprobsMode.PROCESSED_LOGPROBS)

    for number, row in enumerate(rows):
        kept = np.isfinite(dense(processed, number, size))
        bounds = [expect(row, slack=slack).probabilities > 0 for slack in (-1e-5, 1e-5)]
        if (bounds[0] == bounds[1]).all():
            assert (kept == bounds[0]).all()


# Adversarial rows


@pytest.mark.parametrize(
    ("probabilities", "params", "kept"),
    [
        ([0.5, 0.3, 0.1, 0.1], {"top_p": 0.8}, [0, 1]),
        ([0.3, 0.1, 0.1, 0.5], {"top_p": 0.8}, [0, 3]),
        ([0.4, 0.3, 0.2, 0.1], {"top_k": 1, "top_p": 0.8, "temperature": 0.01}, [0]),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 1e-9}, [0]),
        ([0.4, 0.2, 0.2, 0.2], {"top_k": 2}, [0, 1, 2, 3]),
        ([0.4, 0.3, 0.2, 0.1], {"top_k": 4}, [0, 1, 2, 3]),
        ([0.4, 0.4, 0.1, 0.1], {"min_p": 1.0}, [0, 1]),
        ([0.4, 0.3, 0.2, 0.1], {"min_p": 0.49}, [0, 1, 2]),
        ([0.4, 0.3, 0.2, 0.1], {"min_p": 0.6, "top_k": 3, "top_p": 0.99}, [0, 1]),
    ],
)
def test_rows_at_an_edge(probabilities: list[float], params: dict[str, float], kept: list[int]) -> None:
    row = make_row(np.log(probabilities).tolist(), logprobs=-1, **params)

    processed = run([row], mode=LogprobsMode.PROCESSED_LOGPROBS)

    assert np.flatnonzero(np.isfinite(dense(processed, 0, 4))).tolist() == kept


def test_a_greedy_row_with_masked_tokens_beside_a_random_one_stays_a_number() -> None:
    rows = [
        make_row([3.0, 2.0, 1.0], temperature=0.0, allowed_token_ids=(1, 2)),
        make_row([3.0, 2.0, 1.0], temperature=1.5, top_p=0.9, logprobs=1),
    ]

    sampled = run(rows)

    assert int(sampled.token_ids[0]) == 1
    assert torch.isfinite(sampled.logprobs[0].values).all()


def test_logits_beyond_float16_are_numbers_still() -> None:
    logits = torch.tensor([[1e9, 5.0, 1e9, -1e9]]).half()
    rows = [make_row([0.0] * 4, top_p=0.9, repetition_penalty=1.3, logprobs=2)]

    sampled = sample(logits, batch_of(hold(rows), rows))

    assert int(sampled.token_ids[0]) in (0, 2)
    values = sampled.logprobs[0].values[0]
    assert values.tolist() == pytest.approx([-np.log(2)] * 3)


@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 1e30, 1e300])
def test_extreme_penalties_leave_something_to_draw(penalty: float) -> None:
    row = make_row([4.0, -3.0, 0.0], output=[0, 1, 2], repetition_penalty=penalty, frequency_penalty=2.0)

    assert 0 <= int(run([row]).token_ids[0]) < 3
    assert np.isfinite(expect(row).probabilities).all()


def test_masks_survive_every_later_stage() -> None:
    row = Row(
        logits=np.array([9.0, 9.0, 1.0, 0.0, 9.0], dtype=np.float32),
        params=SamplingParams(
            temperature=2.0,
            logit_bias={0: 100.0, 1: 100.0, 4: 100.0},
            bad_words_token_ids=((1,),),
            min_tokens=5,
            repetition_penalty=0.1,
            frequency_penalty=-2.0,
            logprobs=-1,
            max_tokens=None,
        ),
        prompt=[0, 1, 4],
        output=[0, 1, 4],
        grammar=frozenset({1, 2, 3, 4}),
        stop_token_ids=(4,),
    )

    processed = run([row] * 50, mode=LogprobsMode.PROCESSED_LOGPROBS)

    assert np.flatnonzero(np.isfinite(dense(processed, 0, 5))).tolist() == [2, 3]
    assert set(processed.token_ids.tolist()) <= {2, 3}


@pytest.mark.parametrize(
    ("changes", "params", "possible"),
    [
        # A finished grammar wins over min_tokens, and a grammar over what would leave none of its tokens.
        ({"grammar": frozenset({2}), "stop_token_ids": (2,)}, {"min_tokens": 9}, {2}),
        ({"grammar": frozenset({2})}, {"allowed_token_ids": (0, 1)}, {2}),
        ({}, {"bad_words_token_ids": ((0,), (1,), (2,), (3,))}, {0, 1, 2, 3}),
        ({"stop_token_ids": (0, 1, 2, 3)}, {"min_tokens": 9}, {0, 1, 2, 3}),
        ({"vocab_limit": 2}, {"allowed_token_ids": (3,)}, {0, 1}),
    ],
)
def test_no_mask_empties_a_row(changes: dict, params: dict, possible: set[int]) -> None:
    rows = [
        Row(
            logits=np.zeros(4, dtype=np.float32),
            params=SamplingParams(max_tokens=None, **params),
            seed=seed,
            **changes,
        )
        for seed in range(60)
    ]

    assert set(run(rows).token_ids.tolist()) == possible


def test_padding_is_never_sampled_and_has_no_probability() -> None:
    rows = [
        Row(
            logits=np.array([0.0, 1.0, 50.0, 60.0], dtype=np.float32),
            params=SamplingParams(temperature=temperature, logprobs=-1),
            vocab_limit=2,
            seed=seed,
        )
        for seed, temperature in enumerate([0.0, 1.0, 2.0] * 10)
    ]

    sampled = run(rows)

    assert set(sampled.token_ids.tolist()) <= {0, 1}
    assert np.isneginf(dense(sampled, 0, 4)[2:]).all()


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    rows = [make_row([1.0, 3.0, 3.0], temperature=0.0), make_row([2.0, 2.0, 2.0], temperature=0.0)]

    assert run(rows).token_ids.tolist() == [1, 0]


def test_the_logits_stay_as_they_are() -> None:
    generator = np.random.default_rng(2)
    rows = [random_row(generator, 30, logprobs=1) for _ in range(8)]
    logits = logits_of(rows)
    before = logits.clone()

    sample(logits, batch_of(hold(rows), rows))

    assert torch.equal(logits, before)


def test_penalties_are_those_of_their_own_row() -> None:
    logits = [2.0, 1.9, -1.0]
    held = [0, 0, 0, 2]
    rows = [
        make_row(logits, output=held, temperature=0.0, logprobs=-1),
        make_row(logits, output=held, temperature=0.0, frequency_penalty=1.0, logprobs=-1),
    ]

    processed = run(rows, mode=LogprobsMode.PROCESSED_LOGITS)

    assert dense(processed, 0, 3).tolist() == pytest.approx([2.0, 1.9, -1.0])
    assert dense(processed, 1, 3).tolist() == pytest.approx([-1.0, 1.9, -2.0])


# State that grows with the output


def test_counts_that_grew_step_by_step_are_those_made_at_once() -> None:
    generator = np.random.default_rng(5)
    rows = [random_row(generator, SIZE, logprobs=-1, temperature=0.8) for _ in range(10)]
    held = hold(rows, mode=LogprobsMode.PROCESSED_LOGPROBS, max_num_seqs=16)

    for step in range(12):
        if step == 6:
            # One leaves, and another takes its row and its slots.
            held.remove(3)
            rows[3] = random_row(generator, SIZE, logprobs=-1, repetition_penalty=2.0)
            held.add(3, new_request(rows[3]))
        found = sample(logits_of(rows), batch_of(held, rows))
        afresh = run(rows, mode=LogprobsMode.PROCESSED_LOGPROBS)
        assert torch.equal(found.token_ids, afresh.token_ids)
        assert torch.equal(found.logprobs[0].values, afresh.logprobs[0].values)
        held.append(found.token_ids)
        for row, token_id in zip(rows, found.token_ids.tolist(), strict=True):
            row.output.append(token_id)


def test_parameters_are_written_where_rows_change_only() -> None:
    rows = [make_row([0.0] * 8, temperature=0.5 + 0.1 * number, top_k=3) for number in range(3)]
    held = hold(rows, max_num_seqs=4)
    first, second = batch_of(held, rows), batch_of(held, rows)

    assert first.temperatures.data_ptr() == second.temperatures.data_ptr()

    held.add(3, new_request(make_row([0.0] * 8, temperature=1.5)))
    third = held.batch(np.array([3, 1]), np.array([0, 4]))

    assert third.temperatures.tolist() == pytest.approx([1.5, 0.6])
    assert third.positions.tolist() == [0, 4]


# The draw


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 5, "top_p": 0.9},
        {"min_p": 0.005, "presence_penalty": 1.5, "logit_bias": {3: 2.0}},
    ],
)
def test_draws_follow_the_distribution(params: dict[str, object]) -> None:
    num_draws = 40_000
    logits = np.random.default_rng(3).normal(size=24) * 2
    row = make_row(logits.tolist(), seed=17, output=[1, 2, 2, 7], **params)
    expected = expect(row).probabilities
    tokens = []
    rows = [row] * 2000
    held = hold(rows)
    for position in range(0, num_draws, 2000):
        batch = held.batch(np.arange(2000), np.arange(position, position + 2000))
        tokens += sample(logits_of(rows), batch).token_ids.tolist()

    counts = np.bincount(tokens, minlength=24)
    assert 0.5 * np.abs(counts / num_draws - expected).sum() < 0.01
    often = expected * num_draws >= 5
    gaps = (counts - expected * num_draws) ** 2 / np.maximum(expected * num_draws, 1e-9)
    degrees = int(often.sum()) - 1
    assert gaps[often].sum() < degrees + 5 * (2 * degrees) ** 0.5
    assert counts[expected == 0].sum() == 0


def test_leaving_out_hopeless_tokens_changes_no_draw() -> None:
    generator = np.random.default_rng(1)
    rows = [make_row(generator.normal(size=512) * 6, seed=seed) for seed in range(300)]
    batch = batch_of(hold(rows), rows)

    plain = (logits_of(rows).double() + gumbel_rows(batch.seeds, batch.positions, 512)).argmax(dim=-1)

    assert torch.equal(sample(logits_of(rows), batch).token_ids, plain)


def test_warpers_of_transformers_in_our_order_leave_the_same_tokens() -> None:
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    generator = np.random.default_rng(9)
    for _ in range(200):
        row = make_row(
            generator.normal(size=300) * 3,
            output=generator.integers(0, 300, 20).tolist(),
            repetition_penalty=float(generator.uniform(0.8, 1.5)),
            temperature=float(generator.uniform(0.3, 1.8)),
            min_p=float(generator.uniform(0.0, 0.2)),
            top_k=int(generator.integers(1, 100)),
            top_p=float(generator.uniform(0.1, 0.99)),
            logprobs=-1,
        )
        ids, scores = torch.tensor([[*row.prompt, *row.output]]), logits_of([row])
        for warper in (
            RepetitionPenaltyLogitsProcessor(row.params.repetition_penalty),
            TemperatureLogitsWarper(row.params.temperature),
            MinPLogitsWarper(row.params.min_p),
            TopKLogitsWarper(row.params.top_k),
            TopPLogitsWarper(row.params.top_p),
        ):
            scores = warper(ids, scores)

        found = dense(run([row], mode=LogprobsMode.PROCESSED_LOGPROBS), 0, 300)

        np.testing.assert_allclose(np.exp(found), torch.softmax(scores, -1)[0].numpy(), atol=1e-5)


# Log-probabilities


def test_each_row_gets_as_many_numbers_as_it_asked_for() -> None:
    logits = np.log([0.1, 0.2, 0.3, 0.4]).tolist()
    rows = [
        make_row(logits, temperature=0.0, logprobs=count, logit_bias=bias)
        for count, bias in ((0, {}), (None, {}), (2, {0: 100.0}), (-1, {}), (4, {}))
    ]
    batch = batch_of(hold(rows), rows)
    sampled = sample(logits_of(rows), batch)

    few, whole = batch.logprobs
    assert (few.places, few.wanted, few.num_top) == ([0, 2, 4], [0, 2, 4], 4)
    assert (whole.places, whole.wanted) == ([3], [4])
    biased = sampled.logprobs[0]
    assert biased.token_ids[1, :3].tolist() == [0, 3, 2]
    assert np.exp(biased.values[1, :3].numpy()) == pytest.approx([0.1, 0.4, 0.3])
    assert biased.ranks.tolist() == [1, 4, 1]
    assert sampled.logprobs[1].token_ids[0].tolist() == [3, 3, 2, 1, 0]


@pytest.mark.parametrize("mode", LogprobsMode)
def test_modes_give_their_own_numbers(mode: LogprobsMode) -> None:
    row = make_row([3.0, 2.0, 1.0, 0.0], temperature=0.5, top_k=2, logit_bias={3: 2.5}, logprobs=-1)
    processed = np.array([6.0, -np.inf, -np.inf, 5.0])

    found = dense(run([row], mode=mode), 0, 4)

    expected = {
        LogprobsMode.RAW_LOGITS: [3.0, 2.0, 1.0, 0.0],
        LogprobsMode.RAW_LOGPROBS: expect(row).raw,
        LogprobsMode.PROCESSED_LOGITS: processed,
        LogprobsMode.PROCESSED_LOGPROBS: processed - np.log(np.exp(6.0) + np.exp(5.0)),
    }[mode]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
