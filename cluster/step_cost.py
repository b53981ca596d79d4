"""What a step of the engine costs, learnt from what the replicas report: so a balancer's weights are measured. Pure.

Called by: LoadBook, with every pair of consecutive reports of one replica. The model is

    busy time = steps * base + prefill tokens * p + decode tokens * d + steps * context tokens * c

fitted by least squares over all replicas, which run on equal devices; old observations fade. No coefficient is
negative: one that would be is left out, and the others are fitted again. What the observations do not tell apart (with
one request at a time each step makes one token) is shared out in proportion to `PRIOR`, and so is everything where
nothing was observed yet; only the proportions matter to a balancer.
"""

import operator
from collections.abc import Sequence

import msgspec

from ..engine.messages import EngineStats

KEEP = 0.995
"""What is left of an observation when the next one comes: the last few hundred count."""
SOLVE_EVERY = 16
"""Observations between two fits: one costs about as much as a few decisions."""
_PRIOR_FACTOR = 4.0
"""Coefficients are that many times their prior, give or take: what is nothing unusual."""
_LEAST_ERROR = 0.01
"""Of a prediction; none is better, which also keeps the equations solvable."""


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds: of an empty step, of a prefill token, of a decode token, of a token in a decoding request's context."""

    base_s: float
    prefill_token_s: float
    decode_token_s: float
    context_token_s: float

    def predict(self, work: "StepWork") -> float:
        """Seconds that this work takes."""
        return sum(weight * amount for weight, amount in zip(self.weights, work.amounts, strict=True))

    @property
    def weights(self) -> tuple[float, float, float, float]:
        """In the order of the fields."""
        return (self.base_s, self.prefill_token_s, self.decode_token_s, self.context_token_s)


PRIOR = StepCost(base_s=0.1495, prefill_token_s=4.562e-3, decode_token_s=5.816e-3, context_token_s=54e-6)
"""Proportions to begin with, until `SOLVE_EVERY` reports have come: those of this engine with SmolLM2-135M on one core
of an EPYC, in float32 (launch/bench/results/2-core-epyc-steps-2026-11.md). A card's are others: a step as a whole costs
more of them, and a token of context less."""


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica did between two of its reports, and how long it took.

    num_context_tokens: in the KV cache for the requests of a step, when it began; summed over the steps
    """

    busy_s: float
    num_steps: int
    num_prefill_tokens: int
    num_output_tokens: int
    num_context_tokens: int

    @property
    def amounts(self) -> tuple[float, float, float, float]:
        """In the order of the fields of `StepCost`."""
        return (
            float(self.num_steps),
            float(self.num_prefill_tokens),
            float(self.num_output_tokens),
            float(self.num_context_tokens),
        )


def work_between(earlier: EngineStats, later: EngineStats) -> StepWork | None:
    """Return what one replica did between two reports of it. None: no step, or a new epoch."""
    num_steps = later.num_steps - earlier.num_steps
    busy_s = later.busy_s - earlier.busy_s
    if earlier.epoch != later.epoch or busy_s <= 0.0 or num_steps <= 0:
        return None
    return StepWork(
        busy_s=busy_s,
        num_steps=num_steps,
        num_prefill_tokens=later.num_prefill_tokens_total - earlier.num_prefill_tokens_total,
        num_output_tokens=later.num_output_tokens_total - earlier.num_output_tokens_total,
        num_context_tokens=later.num_context_tokens_total - earlier.num_context_tokens_total,
    )


class StepCostFit:
    """Learns a `StepCost`. Owner: one front end."""

    def __init__(self) -> None:
        self._last: dict[int, EngineStats] = {}
        self._products = [[0.0] * 4 for _ in range(4)]
        self._targets = [0.0] * 4
        self._num_observed = 0
        self._weight = 0.0
        self.cost = PRIOR

    def observe(self, stats: EngineStats) -> None:
        """Take a report. Reports of one replica come in order; a new epoch starts anew."""
        last = self._last.get(stats.dp_rank)
        self._last[stats.dp_rank] = stats
        work = None if last is None else work_between(last, stats)
        if work is None:
            return
        busy_s, features = work.busy_s, work.amounts
        # Relative errors count: a long window is no more worth than a short one.
        weight = 1.0 / (busy_s * busy_s)
        for row in range(4):
            for column in range(4):
                product = weight * features[row] * features[column]
                self._products[row][column] = KEEP * self._products[row][column] + product
            self._targets[row] = KEEP * self._targets[row] + weight * features[row] * busy_s
        self._weight = KEEP * self._weight + 1.0
        self._num_observed += 1
        if self._num_observed % SOLVE_EVERY == 0:
            self.cost = self._solve()

    def forget(self, dp_rank: int) -> None:
        """The replica is gone."""
        self._last.pop(dp_rank, None)

    def _solve(self) -> StepCost:
        """Least squares, drawn a little towards the prior, which is scaled to the time that was really observed."""
        prior = PRIOR.weights
        predicted = sum(target * value for target, value in zip(self._targets, prior, strict=True))
        quadratic = sum(
            prior[row] * self._products[row][column] * prior[column]
            for row in range(4)
            for column in range(4)
        )
        scale = predicted / quadratic if quadratic > 0 else 1.0
        centre = [value * scale for value in prior]
        # As a Gaussian prior would: the less sure the observations, the more it has to say.
        noise = max(
            _LEAST_ERROR**2, self._mean_square_error(centre if self.cost is PRIOR else self.cost.weights)
        )
        strength = [noise / (_PRIOR_FACTOR * value) ** 2 for value in centre]
        active = [0, 1, 2, 3]
        values = [0.0] * 4
        while active:
            matrix = [
                [self._products[i][j] + (strength[i] if i == j else 0.0) for j in active] for i in active
            ]
            right = [self._targets[i] + strength[i] * centre[i] for i in active]
            solved = solve(matrix, right)
            if all(value >= 0.0 for value in solved):
                for index, value in zip(active, solved, strict=True):
                    values[index] = value
                break
            lowest = min(range(len(active)), key=lambda k: solved[k] / centre[active[k]])
            del active[lowest]
        return StepCost(
            base_s=values[0],
            # The unit of all costs: it must not vanish.
            prefill_token_s=max(values[1], 1e-3 * centre[1]),
            decode_token_s=values[2],
            context_token_s=values[3],
        )

    def _mean_square_error(self, values: Sequence[float]) -> float:
        """Of the predictions with these coefficients, relative to what was observed."""
        explained = 0.0
        for row, value in enumerate(values):
            predicted = sum(map(operator.mul, self._products[row], values))
            explained += value * (2 * self._targets[row] - predicted)
        return 1.0 - explained / self._weight


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Solve a small system with a positive definite matrix, after scaling its diagonal to 1."""
    size = len(right)
    scale = [matrix[i][i] ** -0.5 for i in range(size)]
    rows = [
        [matrix[i][j] * scale[i] * scale[j] for j in range(size)] + [right[i] * scale[i]] for i in range(size)
    ]
    for pivot in range(size):
        best = max(range(pivot, size), key=lambda i: abs(rows[i][pivot]))
        rows[pivot], rows[best] = rows[best], rows[pivot]
        for row in range(pivot + 1, size):
            factor = rows[row][pivot] / rows[pivot][pivot]
            for column in range(pivot, size + 1):
                rows[row][column] -= factor * rows[pivot][column]
    values = [0.0] * size
    for row in reversed(range(size)):
        rest = rows[row][size] - sum(rows[row][column] * values[column] for column in range(row + 1, size))
        values[row] = rest / rows[row][row]
    return [value * factor for value, factor in zip(values, scale, strict=True)]
