"""The stream of requests of cluster-bench serve."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.bench.errors import BenchError
from phalanx.launch.bench.traces import (
    BLOCK_TOKENS,
    SHAPES,
    TraceRequest,
    gaps_s,
    parse_trace,
    synthesize_trace,
)
from phalanx.launch.bench.workload import (
    fit_text,
    fit_trace,
    make_requests,
    random_trace,
    scaled,
    with_arrivals,
)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.4799600,110,0
"""
MOONCAKE = """{"timestamp": 2000, "input_length": 1030, "output_length": 9, "hash_ids": [0, 1, 2]}
{"timestamp": 500, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}
"""


def test_azures_trace_is_read() -> None:
    assert parse_trace(AZURE) == [
        TraceRequest(arrival_s=0.0, num_prompt_tokens=4808, num_output_tokens=10),
        TraceRequest(arrival_s=1.5, num_prompt_tokens=110, num_output_tokens=1),
    ]


def test_mooncakes_trace_is_read_in_order_of_arrival_with_whole_blocks_only() -> None:
    assert parse_trace(MOONCAKE) == [
        TraceRequest(arrival_s=0.0, num_prompt_tokens=600, num_output_tokens=5, block_hashes=(0,)),
        TraceRequest(arrival_s=1.5, num_prompt_tokens=1030, num_output_tokens=9, block_hashes=(0, 1)),
    ]


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', "TIMESTAMP,ContextTokens,GeneratedTokens\n"]
)
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(BenchError):
        parse_trace(text)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_made_up_trace_has_the_statistics_of_its_model(name: str) -> None:
    shape = SHAPES[name]
    trace = synthesize_trace(shape, 20_000, seed=1)

    median = shape.quantile_parts.index(0.5)
    lengths = [request.num_prompt_tokens for request in trace]
    outputs = [request.num_output_tokens for request in trace]
    assert statistics.median(lengths) == pytest.approx(shape.prompt_tokens[median], rel=0.05)
    assert statistics.median(outputs) == pytest.approx(shape.output_tokens[median], rel=0.05)
    assert max(lengths) <= shape.prompt_tokens[-1]
    if shape.gap_cv < 5:  # the mean of very uneven gaps needs more of them than a test has time for
        assert len(trace) / trace[-1].arrival_s == pytest.approx(shape.rate, rel=0.1)
    seen: set[int] = set()
    num_reused = 0
    for request in trace:
        num_reused += bool(request.block_hashes and request.block_hashes[0] in seen)
        seen.update(request.block_hashes)
    assert num_reused / len(trace) == pytest.approx(shape.reuse, abs=0.02)
    assert trace == synthesize_trace(shape, 20_000, seed=1)
    assert trace != synthesize_trace(shape, 20_000, seed=2)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_variation_that_were_asked_for(cv: float) -> None:
    gaps = gaps_s(4.0, cv, random.Random(0))
    drawn = [next(gaps) for _ in range(50_000)]

    assert statistics.mean(drawn) == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(drawn) / statistics.mean(drawn) == pytest.approx(cv, rel=0.05)


def test_random_lengths_stay_in_their_range_and_share_whole_blocks() -> None:
    trace = random_trace(
        200, num_prompt_tokens=1200, num_output_tokens=50, range_ratio=0.5, num_shared_tokens=1100, seed=3
    )

    assert all(600 <= request.num_prompt_tokens <= 1800 for request in trace)
    assert all(25 <= request.num_output_tokens <= 75 for request in trace)
    assert {request.block_hashes for request in trace} == {(0,), (0, 1)}
    requests = make_requests(trace, vocab_size=1000, seed=3, tokenizer=None)
    assert len({tuple(request.prompt[:BLOCK_TOKENS]) for request in requests}) == 1
    assert len({tuple(request.prompt) for request in requests}) == 200


@given(
    lengths=st.lists(st.tuples(st.integers(1, 1500), st.integers(1, 50)), min_size=1, max_size=8),
    seed=st.integers(),
)
def test_prompts_have_their_lengths_and_follow_from_the_seed(
    lengths: list[tuple[int, int]], seed: int
) -> None:
    trace = [
        TraceRequest(
            arrival_s=float(index),
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            block_hashes=tuple(range(num_prompt_tokens // BLOCK_TOKENS)),
        )
        for index, (num_prompt_tokens, num_output_tokens) in enumerate(lengths)
    ]
    requests = make_requests(trace, vocab_size=50, seed=seed, tokenizer=None)

    assert [len(request.prompt) for request in requests] == [prompt for prompt, _ in lengths]
    assert all(3 <= token_id < 50 for request in requests for token_id in request.prompt if token_id != "")  # type: ignore[operator]
    assert requests == make_requests(trace, vocab_size=50, seed=seed, tokenizer=None)
    shared = [request.prompt[:BLOCK_TOKENS] for request in requests if len(request.prompt) >= BLOCK_TOKENS]
    assert all(prompt == shared[0] for prompt in shared)


def test_a_trace_is_cut_to_what_fits() -> None:
    trace = parse_trace(MOONCAKE)
    assert fit_trace(trace, 1, max_model_len=None) == trace[:1]
    assert fit_trace(trace, None, max_model_len=1000) == trace[:1]
    with pytest.raises(BenchError):
        fit_trace(trace, None, max_model_len=100)


def test_arrivals_are_replaced_or_scaled() -> None:
    trace = parse_trace(MOONCAKE)
    assert [request.arrival_s for request in scaled(trace, 3.0)] == [0.0, 0.5]
    arrivals = [request.arrival_s for request in with_arrivals(trace, 2.0, cv=1.0, seed=0)]
    assert arrivals[0] == 0.0 < arrivals[1]
    assert arrivals == [request.arrival_s for request in with_arrivals(trace, 2.0, cv=1.0, seed=0)]


@given(st.lists(st.integers(0, 25), min_size=1, max_size=40))
def test_text_is_fitted_to_the_number_of_tokens(token_ids: list[int]) -> None:
    # Pairs of one letter are one token, so that text of random tokens encodes to fewer.
    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for letter in text:
            if ids and ids[-1] == ord(letter) - 97:
                ids[-1] += 26
            else:
                ids.append(ord(letter) - 97)
        return ids

    def decode(ids: object) -> str:
        return "".join(chr(97 + token_id % 26) * (1 + token_id // 26) for token_id in ids)  # type: ignore[attr-defined]

    text = fit_text(token_ids, encode, decode)

    assert len(encode(text)) <= len(token_ids)
    if len(set(token_ids)) > 1:
        assert abs(len(encode(text)) - len(token_ids)) <= 1
