"""Models with a sliding window through the whole engine: exact far beyond it, in a cache that holds little more.

The reference is transformers, on the same random weights.
"""

from contextlib import ExitStack
from typing import Any

import pytest
from transformers.utils import logging

from support.engine import collect_tokens, make_request
from support.open_core import open_core, run_core
from support.random_models import reference_model, reference_tokens, write_random_model

PROMPT = [(7 * index * index + 3 * index) % 320 + 3 for index in range(150)]
GEMMA = {
    "num_hidden_layers": 7,
    "sliding_window": 20,
    "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 24}),
    "gemma3": ("gemma3_text", GEMMA),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
}
BLOCK_SIZE = 4
CHUNK = 32


@pytest.fixture(scope="module", autouse=True)
def no_progress_bars():
    """A progress bar of transformers leaves a thread behind."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture
def open_one(tmp_path):
    """Open engine cores with the model in `tmp_path`; they are closed in the end."""
    with ExitStack() as cores:
        yield lambda num_blocks: cores.enter_context(
            open_core(tmp_path, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_batched_tokens=CHUNK)
        )


def run(core, *requests):
    """Run requests to their end: tokens of each, cached tokens of each, and the most blocks in use."""
    outputs, most_blocks = run_core(core, *requests)
    cached = {output.request_id: output.num_cached_tokens for output in reversed(outputs)}
    return collect_tokens(outputs), cached, most_blocks


@pytest.mark.parametrize("name", MODELS)
def test_long_requests_are_exact_in_a_cache_that_holds_their_windows(tmp_path, open_one, name):
    model_type, fields = MODELS[name]
    reference = reference_model(write_random_model(tmp_path, model_type, **fields))
    expected = reference_tokens(reference, PROMPT, 40)
    core = open_one(400)
    windows = core.report.kv_windows
    # Before a chunk, in it, and two columns that are used in part.
    in_window = {
        window: -(-(window - 1 + CHUNK) // BLOCK_SIZE) + 1 for window in windows if window is not None
    }
    total = -(-(len(PROMPT) + 40) // BLOCK_SIZE)
    bound = sum(total if window is None else in_window[window] for window in windows)

    tokens, _, peak = run(core, make_request("a", prompt_token_ids=PROMPT, max_tokens=40, temperature=0.0))

    assert tokens["a"] == expected
    assert peak <= bound < total * len(windows)
    assert core.stats().kv_usage == 0.0

    # The same with not one block to spare: what leaves a window is given out again within the request.
    tight = open_one(1 + bound)
    tokens, _, _ = run(tight, make_request("a", prompt_token_ids=PROMPT, max_tokens=40, temperature=0.0))
    assert tokens["a"] == expected


@pytest.mark.parametrize("name", MODELS)
def test_a_hit_is_exact_also_when_the_blocks_before_the_window_are_gone(tmp_path, open_one, name):
    model_type, fields = MODELS[name]
    reference = reference_model(write_random_model(tmp_path, model_type, **fields))
    longer = [*PROMPT, *range(5, 25)]
    other = [token_id + 1 for token_id in PROMPT[:60]]
    core = open_one(300)
    greedy = {"max_tokens": 6, "temperature": 0.0}

    run(core, make_request("first", prompt_token_ids=PROMPT, **greedy))
    tokens, cached, _ = run(
        core,
        make_request("longer", prompt_token_ids=longer, **greedy),
        make_request("half", prompt_token_ids=PROMPT[:90], **greedy),
        make_request("other", prompt_token_ids=other, **greedy),
    )

    assert tokens == {
        "longer": reference_tokens(reference, longer, 6),
        "half": reference_tokens(reference, PROMPT[:90], 6),
        "other": reference_tokens(reference, other, 6),
    }
    assert cached["longer"] == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
    assert cached["other"] == 0


@pytest.mark.parametrize(("name", "num_blocks"), [("mistral", 20), ("gemma3", 100), ("qwen2", 30)])
def test_preemption_in_a_cache_that_is_too_small_for_all_changes_no_token(
    tmp_path, open_one, name, num_blocks
):
    model_type, fields = MODELS[name]
    reference = reference_model(write_random_model(tmp_path, model_type, **fields))
    prompts = {f"r{index}": PROMPT[index * 9 : index * 9 + 10] for index in range(4)}
    core = open_one(1 + num_blocks)
    requests = [
        make_request(request_id, prompt_token_ids=prompt, max_tokens=40, temperature=0.0)
        for request_id, prompt in prompts.items()
    ]

    tokens, _, _ = run(core, *requests)

    assert core.stats().num_preemptions > 0
    assert tokens == {
        request_id: reference_tokens(reference, prompt, 40) for request_id, prompt in prompts.items()
    }
