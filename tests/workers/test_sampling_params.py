"""Parameters out of their bounds are refused by name, and those at the bounds are not."""

import math

import msgspec
import numpy as np
import pytest

from phalanx.workers.sampling_params import SamplingParams, SamplingParamsError

GOOD = {
    "temperature": [0, 0.0, 1e-6, 2, np.float64(0.5)],
    "top_p": [1e-9, 1],
    "top_k": [-1, 0, 1, 10**9, 2**63, 10**30],
    "min_p": [0, 1.0],
    "repetition_penalty": [1e-300, 1, 1e300, 10**300],
    "frequency_penalty": [-2, 2.0],
    "presence_penalty": [-2.0, 2],
    "logit_bias": [{}, {0: -1e9, 5: math.inf}, {1: 10**400, 2: -(10**400)}],
    "allowed_token_ids": [None, [3], (1, 2)],
    "bad_words": [[], "one", ["a", "b"]],
    "bad_words_token_ids": [[], [[1], [2, 3]]],
    "seed": [None, -(2**63), 2**63 - 1],
    "max_tokens": [None, 1],
    "min_tokens": [0, 16],
    "stop": ["x", ["x", "y"], []],
    "stop_token_ids": [[], [0]],
    "logprobs": [None, -1, 0, 20],
    "prompt_logprobs": [None, -1, 0],
    "n": [1, 128],
}
BAD = {
    "temperature": [-0.1, 2.1, math.nan, math.inf, "1", True, None],
    "top_p": [0, -1, 1.1, math.nan],
    "top_k": [-2, 1.5, True, "5"],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0, -1, math.inf, math.nan, "1"],
    "frequency_penalty": [-2.1, 2.1, math.nan],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "logit_bias": [
        {-1: 0.0},
        {"a": 0.0},
        {1: math.nan},
        {1: "x"},
        [1],
        {True: 1.0},
        dict.fromkeys(range(1025), 1.0),
    ],
    "allowed_token_ids": [[], [-1], [1.5], 7, "12"],
    "bad_words": [[""], [1], 5],
    "bad_words_token_ids": [[[]], [[-1]], [3]],
    "seed": [-(2**63) - 1, 2**63, 1.0],
    "max_tokens": [0, -1, 1.5],
    "min_tokens": [-1, 17, 1.5],
    "stop": ["", ["a", ""], [1], 5],
    "stop_token_ids": [[-1], ["1"], 5],
    "logprobs": [-2, True, 1.5, "1"],
    "prompt_logprobs": [-2, False],
    "n": [0, 129, True],
    "ignore_eos": [1, None],
    "detokenize": ["yes"],
    "structured_outputs": ["a", {"regex": "a"}],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in GOOD for value in GOOD[field]])
def test_values_within_bounds_survive_the_wire(field: str, value: object) -> None:
    params = SamplingParams(**{field: value})

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in BAD for value in BAD[field]])
def test_values_out_of_bounds_name_their_field(field: str, value: object) -> None:
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**{field: value})

    assert caught.value.field == field


@pytest.mark.parametrize("number", [10**5000, -(10**5000)], ids=["positive", "negative"])
def test_numbers_too_long_to_be_printed_name_their_field_like_any_other(number: int) -> None:
    for field in ("seed", "top_p", "temperature", "n"):
        with pytest.raises(SamplingParamsError, match=f"{field}: must be .* not one of thousands of digits"):
            SamplingParams(**{field: number})
    # These have no bounds.
    SamplingParams(logit_bias={1: number}, max_tokens=abs(number))


def test_a_tiny_temperature_is_raised_and_zero_is_greedy() -> None:
    assert SamplingParams(temperature=1e-6).temperature == 0.01
    assert SamplingParams(temperature=0).is_greedy
