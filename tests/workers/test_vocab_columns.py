"""The place of the largest value of each row."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.workers.vocab_columns import first_argmax


@given(
    width=st.sampled_from([1, 63, 64, 128, 192, 256, 300, 768]),
    num_rows=st.integers(0, 3),
    seed=st.integers(0, 1000),
    num_values=st.sampled_from([1, 2, 1000]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    special=st.sampled_from([None, -math.inf, math.inf, math.nan]),
)
def test_the_first_of_the_largest_values_is_found(
    width: int, num_rows: int, seed: int, num_values: int, dtype: torch.dtype, special: float | None
) -> None:
    """num_values: few make ties."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(num_values, (num_rows, width), generator=generator).to(dtype)
    if special is not None:
        x[torch.rand(x.shape, generator=generator) < 0.05] = special

    rows = x.tolist()

    # A NaN is the largest.
    orders = [[(math.isnan(number), number if number == number else 0.0) for number in row] for row in rows]
    assert first_argmax(x).tolist() == [order.index(max(order)) for order in orders]


@pytest.mark.parametrize("width", [100, 256])
def test_a_row_of_nothing_but_minus_infinity_has_its_first_place(width: int) -> None:
    assert first_argmax(torch.full((2, width), -math.inf)).tolist() == [0, 0]
