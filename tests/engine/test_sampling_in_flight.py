"""What the sampler knows of a request is the same however its steps were cut, repeated or overlapped.

A calm run, one step at a time and nothing preempted, is the reference; the same requests then go through a cache that
is too small for them, in small chunks, with two steps in flight.
"""

import itertools

import numpy as np
import pytest

from support.engine import collect_tokens, make_request
from support.open_core import open_core, run_core
from support.random_models import write_random_model

PROMPTS = [[(7 * index * index + start * index) % 320 + 3 for index in range(17)] for start in (3, 5, 11, 2)]
GREEDY = {"temperature": 0.0, "max_tokens": 20}
CALM = {"num_blocks": 200, "max_num_batched_tokens": 128, "max_steps_in_flight": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), "llama")


def make_requests(**params):
    return [
        make_request(f"r{index}", prompt_token_ids=prompt, **{**GREEDY, **params})
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.8, "presence_penalty": 1.0},
        {"temperature": 1.0, "frequency_penalty": 1.0},
    ],
)
def test_penalties_count_every_token_once_whatever_is_in_flight(folder, params):
    with open_core(folder, **CALM) as core:
        expected = collect_tokens(run_core(core, *make_requests(**params))[0])
        plain = collect_tokens(run_core(core, *make_requests())[0])
        assert core.stats().num_preemptions == 0

    with open_core(folder, num_blocks=22, max_num_batched_tokens=9) as core:
        found = collect_tokens(run_core(core, *make_requests(**params))[0])
        assert core.stats().num_preemptions > 0

    assert found == expected
    assert expected != plain, "the penalties change something"


def test_bad_words_end_with_the_token_that_is_made_last(folder):
    """The token before the forbidden one may still be on its way when the step is planned."""
    with open_core(folder, **CALM) as core:
        plain = collect_tokens(run_core(core, *make_requests())[0])
        words = tuple(tuple(tokens[5:7]) for tokens in plain.values())
        expected = collect_tokens(run_core(core, *make_requests(bad_words_token_ids=words))[0])

    with open_core(folder, num_blocks=22, max_num_batched_tokens=9) as core:
        found = collect_tokens(run_core(core, *make_requests(bad_words_token_ids=words))[0])

    assert found == expected
    for tokens in found.values():
        assert not set(words) & set(itertools.pairwise(tokens))


def test_prompt_logprobs_are_whole_after_chunks_preemption_and_a_prompt_that_is_cached(folder):
    def run(**settings):
        with open_core(folder, **settings) as core:
            run_core(core, make_request("before", prompt_token_ids=PROMPTS[0], **GREEDY))
            outputs, _ = run_core(core, *make_requests(prompt_logprobs=2))
            told = [output for output in outputs if output.prompt_logprobs is not None]
            assert [output.num_cached_tokens for output in told] == [0] * len(PROMPTS)
            tables = {output.request_id: output.prompt_logprobs for output in told}
            assert len(told) == len(tables) == len(PROMPTS), "each is told once"
            return tables, core.stats().num_preemptions

    expected, _ = run(**CALM)
    found, num_preemptions = run(num_blocks=22, max_num_batched_tokens=9)

    assert num_preemptions > 0
    for request_id, table in expected.items():
        assert len(table.ranks) == 4 * (len(PROMPTS[0]) - 1)
        assert found[request_id].token_ids == table.token_ids
        np.testing.assert_allclose(
            np.frombuffer(found[request_id].values, dtype="<f4"),
            np.frombuffer(table.values, dtype="<f4"),
            atol=1e-4,
        )
