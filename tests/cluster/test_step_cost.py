"""The cost of a step is learnt from reports of any mixture of work, and never becomes negative."""

import random

import pytest

from phalanx.cluster.step_cost import PRIOR, StepCost, StepCostFit
from support.cluster import make_stats

TRUE = StepCost(base_s=0.02, prefill_token_s=1e-4, decode_token_s=3e-4, context_token_s=1e-7)


def feed(fit: StepCostFit, cost: StepCost, num_reports: int, *, seed: int = 0, noise: float = 0.0) -> None:
    rng = random.Random(seed)
    busy_s, steps, prefill, output, context = 0.0, 0, 0, 0, 0
    for number in range(num_reports):
        fit.observe(
            make_stats(
                0,
                sequence=number,
                busy_s=busy_s,
                num_steps=steps,
                num_prefill_tokens_total=prefill,
                num_output_tokens_total=output,
                num_context_tokens_total=context,
            )
        )
        new_steps, new_prefill, new_output = rng.randrange(1, 9), rng.randrange(9000), rng.randrange(600)
        new_context = new_steps * rng.randrange(200_000)
        spent = (
            new_steps * cost.base_s
            + new_prefill * cost.prefill_token_s
            + new_output * cost.decode_token_s
            + new_context * cost.context_token_s
        )
        busy_s += spent * (1 + rng.uniform(-noise, noise))
        steps, prefill, output, context = (
            steps + new_steps,
            prefill + new_prefill,
            output + new_output,
            context + new_context,
        )


def test_it_finds_the_cost_of_each_part() -> None:
    fit = StepCostFit()
    feed(fit, TRUE, 400, noise=0.1)

    assert fit.cost.base_s == pytest.approx(TRUE.base_s, rel=0.15)
    assert fit.cost.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.15)
    assert fit.cost.decode_token_s == pytest.approx(TRUE.decode_token_s, rel=0.3)
    assert fit.cost.context_token_s == pytest.approx(TRUE.context_token_s, rel=0.3)


def test_what_cannot_be_told_apart_is_shared_out_as_the_prior_has_it() -> None:
    # One request at a time: as many decode tokens as steps, and always about the same context.
    fit = StepCostFit()
    rng = random.Random(5)
    busy_s, steps, prefill = 0.0, 0, 0
    for number in range(400):
        fit.observe(
            make_stats(
                0,
                sequence=number,
                busy_s=busy_s,
                num_steps=steps,
                num_prefill_tokens_total=prefill,
                num_output_tokens_total=steps,
                num_context_tokens_total=500 * steps,
            )
        )
        new_steps, new_prefill = rng.randrange(1, 9), rng.randrange(300)
        busy_s += (new_steps * 0.01 + new_prefill * 1e-4) * rng.uniform(0.7, 1.4)
        steps, prefill = steps + new_steps, prefill + new_prefill

    base, _, decode, context = fit.cost.weights
    together = base + decode + 500 * context
    assert together == pytest.approx(0.01, rel=0.2)
    assert fit.cost.prefill_token_s == pytest.approx(1e-4, rel=0.2)
    assert base > 0.8 * together


def test_it_follows_a_change() -> None:
    fit = StepCostFit()
    feed(fit, TRUE, 300)
    feed(fit, StepCost(base_s=0.04, prefill_token_s=2e-4, decode_token_s=6e-4, context_token_s=2e-7), 2500)

    assert fit.cost.prefill_token_s == pytest.approx(2e-4, rel=0.1)


@pytest.mark.parametrize("name", ["base_s", "decode_token_s", "context_token_s"])
def test_what_costs_nothing_is_not_negative(name: str) -> None:
    values = {field: getattr(TRUE, field) for field in TRUE.__struct_fields__}
    fit = StepCostFit()
    feed(fit, StepCost(**{**values, name: 0.0}), 400, noise=0.2)

    assert all(getattr(fit.cost, field) >= 0 for field in TRUE.__struct_fields__)
    assert fit.cost.prefill_token_s > 0


def test_before_anything_is_known_the_prior_holds_and_a_new_epoch_is_no_observation() -> None:
    fit = StepCostFit()
    for epoch in range(100):
        fit.observe(make_stats(0, epoch=epoch, busy_s=1.0 + epoch, num_steps=10 + epoch))

    assert fit.cost == PRIOR
