"""The model against transformers, and against itself in other batches, chunks and splits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

from phalanx.workers.kernels.packed_weight import HalfWeight
from phalanx.workers.layers import linear
from phalanx.workers.sampling_params import SamplingParams
from support.model_steps import StepDriver, make_worker
from support.ranks import open_ranks
from support.tiny_models import LICENSE_PATH, LLAMA3_ROPE, TRAINED, write_tiny_llama

PROMPT = [(7 * index * index + 3 * index) % 380 + 3 for index in range(45)]
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "llama3 rope": {"rope_scaling": LLAMA3_ROPE},
    "no head_dim": {"head_dim": None},
    "one KV head": {"num_heads": 4, "num_kv_heads": 1},
    "no grouping": {"num_heads": 3, "num_kv_heads": 3},
    "odd vocabulary": {"vocab_size": 331, "tie_word_embeddings": False},
}


def reference_tokens(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by transformers, without a cache."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module", autouse=True)
def no_progress_bars() -> Iterator[None]:
    """A progress bar of transformers leaves a thread behind."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def driver(tiny: Path) -> Iterator[StepDriver]:
    worker = make_worker(tiny)
    worker.start()
    worker.initialize_kv_cache(128)
    yield StepDriver(worker)
    worker.close()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    folder = write_tiny_llama(tmp_path, **shape)
    prompt = [token_id % 320 for token_id in PROMPT]
    worker = make_worker(folder)
    worker.start()
    worker.initialize_kv_cache(32)
    driver = StepDriver(worker)

    driver.add("a", prompt)

    assert driver.generate("a", 24) == reference_tokens(folder, prompt, 24)
    worker.close()


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="FBGEMM is for x86-64")
def test_a_bfloat16_checkpoint_served_in_float32_is_packed_as_halves_and_loses_nothing(
    tmp_path: Path,
) -> None:
    folder = write_tiny_llama(tmp_path, dtype="bfloat16")
    worker = make_worker(folder)
    worker.start()
    worker.initialize_kv_cache(32)
    driver = StepDriver(worker)
    stored = [module for module in worker.model.modules() if isinstance(module, linear.StoredWeight)]

    driver.add("a", PROMPT)

    assert stored
    assert all(isinstance(module.packed, HalfWeight) for module in stored)
    assert driver.generate("a", 24) == reference_tokens(folder, PROMPT, 24)
    worker.close()


def test_projections_may_leave_their_sums_to_the_norm_that_follows(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where it saves a kernel."""
    num_calls = 0

    def product_in_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        middle = x.shape[1] // 2
        return torch.stack([x[:, :middle] @ weight[:, :middle].T, x[:, middle:] @ weight[:, middle:].T])

    monkeypatch.setattr(linear, "product_in_parts", product_in_parts)
    monkeypatch.setattr(linear, "pack_weight", lambda weight: None)
    worker = make_worker(tiny)
    worker.start()
    worker.initialize_kv_cache(32)
    driver = StepDriver(worker)
    driver.add("a", PROMPT)

    assert driver.generate("a", 12) == reference_tokens(tiny, PROMPT, 12)
    assert num_calls == 12 * 2 * len(worker.model.layers)
    worker.close()


def test_logits_are_those_of_transformers(tiny: Path, driver: StepDriver) -> None:
    worker = driver.worker
    seen: list[torch.Tensor] = []
    worker._model.head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    driver.add("a", PROMPT)
    driver.run_step()

    model = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]

    torch.testing.assert_close(seen[0][0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 5, 16, 33])
def test_a_prompt_in_chunks_gives_the_same_tokens(driver: StepDriver, chunk: int) -> None:
    driver.add("whole", PROMPT)
    expected = driver.generate("whole", 12)
    driver.remove("whole")

    driver.add("chunked", PROMPT)
    for start in range(0, len(PROMPT), chunk):
        output = driver.run_step({"chunked": min(chunk, len(PROMPT) - start)})
        assert bool(output.request_ids) == (start + chunk >= len(PROMPT))

    assert driver.generate("chunked", 12) == expected


def test_a_request_alone_and_in_a_mixed_batch_gives_the_same_tokens(driver: StepDriver) -> None:
    random = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, max_tokens=100)
    requests = {
        f"r{index}": (PROMPT[: 3 + 7 * index], random if index % 2 else SamplingParams(temperature=0.0))
        for index in range(6)
    }
    alone = {}
    for name, (prompt, params) in requests.items():
        driver.add(name, prompt, params, seed=len(prompt))
        alone[name] = driver.generate(name, 15)
        driver.remove(name)

    for name, (prompt, params) in requests.items():
        driver.add(name, prompt, params, seed=len(prompt))
        driver.run_step()
    for _ in range(15):
        driver.run_step()

    assert {name: driver.output_tokens(name)[:15] for name in requests} == alone


def test_a_prefix_hit_gives_the_same_tokens(driver: StepDriver) -> None:
    driver.add("first", PROMPT)
    expected = driver.generate("first", 10)

    driver.add("second", PROMPT, shared_block_ids=driver.blocks["first"][:2])
    output = driver.run_step()

    assert set(output.request_ids) == {"first", "second"}
    assert driver.generate("second", 10) == expected


def test_a_resumed_request_goes_on_with_the_same_random_tokens(driver: StepDriver) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=100)
    driver.add("whole", PROMPT, params, seed=-5)
    expected = driver.generate("whole", 20)
    driver.remove("whole")

    driver.add("resumed", PROMPT + expected[:9], params, num_prompt_tokens=len(PROMPT), seed=-5)

    assert driver.generate("resumed", 20) == expected


def test_min_tokens_holds_the_end_back(driver: StepDriver) -> None:
    driver.add("free", PROMPT)
    first = driver.generate("free", 8)
    ends = tuple(set(first))

    params = SamplingParams(temperature=0.0, min_tokens=5, max_tokens=100)
    driver.add("held", PROMPT, params, stop_token_ids=ends)

    assert not set(driver.generate("held", 5)) & set(ends)


def test_stale_values_in_free_slots_do_not_reach_a_result(driver: StepDriver) -> None:
    driver.add("clean", PROMPT)
    expected = driver.generate("clean", 10)
    driver.remove("clean")
    with torch.inference_mode():
        for cache in driver.worker._runner._forward._kv_caches:
            cache.k[1:] = torch.nan
            cache.v[1:] = torch.nan

    driver.add("short", PROMPT[:3])
    driver.add("same", PROMPT)
    driver.run_step()

    assert driver.generate("same", 10) == expected


def test_a_count_that_differs_from_the_schedulers_is_an_error(driver: StepDriver) -> None:
    driver.add("a", PROMPT)
    driver.run_step()
    driver.held["a"].num_computed -= 1

    with pytest.raises(RuntimeError, match=r"counts computed tokens as \[44\], and they are \[45\] here"):
        driver.run_step()


def test_a_step_without_tokens_only_drops_rows(driver: StepDriver) -> None:
    driver.add("a", PROMPT)
    driver.run_step()
    driver.remove("a")

    output = driver.run_step()

    assert output.request_ids == []
    assert driver.worker._runner._batch.request_ids == []


@pytest.mark.parametrize("tp_size", [2, 3, 4, 6])
def test_ranks_give_the_tokens_of_one_rank(tiny: Path, driver: StepDriver, tp_size: int) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=100)
    driver.add("greedy", PROMPT)
    driver.add("random", PROMPT[:20], params)
    expected = driver.generate("greedy", 12), driver.output_tokens("random")

    with open_ranks(tiny, tp_size) as split:
        split.add("greedy", PROMPT)
        split.add("random", PROMPT[:20], params)

        assert (split.generate("greedy", 12), split.output_tokens("random")) == expected


def test_the_trained_model_knows_its_text() -> None:

    text = LICENSE_PATH.read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    worker = make_worker(TRAINED)
    worker.start()
    worker.initialize_kv_cache(128)
    driver = StepDriver(worker)
    start = text.index("You may reproduce and distribute")
    cut = text.index(" form, provided that", start)
    driver.add("a", tokenizer.encode(text[start:cut]))

    continuation = tokenizer.decode(driver.generate("a", 60))

    assert text[cut:].startswith(continuation)
    worker.close()
