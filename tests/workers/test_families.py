"""Every family against transformers: small random models of its shape, whole and split over ranks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from phalanx.shm.errors import ConfigError
from phalanx.workers.sampling_params import SamplingParams
from phalanx.workers.transformer_config import LayerType, RopeConfig, RopeType, read_transformer_config
from support.random_models import (
    edit_config,
    reference_model,
    reference_tokens,
    write_random_model,
)
from support.ranks import open_ranks

PROMPT = [(7 * index * index + 3 * index) % 320 + 3 for index in range(75)]
NUM_TOKENS = 16
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA = {
    "num_hidden_layers": 4,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3": ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with a window": ("qwen2", QWEN_WINDOW),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3 with soft limits": ("gemma3_text", {**GEMMA, "final_logit_softcapping": 3.0}),
}


@pytest.fixture(scope="module", autouse=True)
def no_progress_bars() -> Iterator[None]:
    """A progress bar of transformers leaves a thread behind."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model_type, fields = FAMILIES[name]
    reference = reference_model(write_random_model(tmp_path, model_type, **fields))
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0, -1]

    with open_ranks(tmp_path, 1) as driver:
        seen: list[torch.Tensor] = []
        model = driver.worker.workers[0]._model
        compute_logits = model.compute_logits
        model.compute_logits = lambda hidden: seen.append(compute_logits(hidden)) or seen[-1]
        driver.add("a", PROMPT)
        tokens = driver.generate("a", NUM_TOKENS)

    torch.testing.assert_close(seen[0][0], expected, atol=2e-4, rtol=1e-4)
    assert tokens == reference_tokens(reference, PROMPT, NUM_TOKENS)


def test_soft_limits_hold_for_each_ranks_part_of_the_logits(tmp_path: Path) -> None:
    model_type, fields = FAMILIES["gemma3 with soft limits"]
    write_random_model(tmp_path, model_type, **fields)
    drawn = []
    for tp_size in (1, 2):
        with open_ranks(tmp_path, tp_size) as driver:
            driver.add("a", PROMPT, SamplingParams(temperature=1.0, max_tokens=100))
            drawn.append(driver.generate("a", 20))

    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("name", ["mistral", "qwen2 with a window", "gemma3"])
@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_a_window_holds_in_chunks_in_batches_and_after_a_prefix_hit(
    tmp_path: Path, name: str, chunk: int
) -> None:
    model_type, fields = FAMILIES[name]
    reference = reference_model(write_random_model(tmp_path, model_type, **fields))
    expected = reference_tokens(reference, PROMPT, 6)
    short = reference_tokens(reference, PROMPT[:9], 6)

    with open_ranks(tmp_path, 1) as driver:
        driver.add("short", PROMPT[:9])
        driver.run_step()
        driver.add("chunked", PROMPT)
        for start in range(0, len(PROMPT), chunk):
            with_short = {"short": 1} if start < 3 * chunk else {}
            driver.run_step({"chunked": min(chunk, len(PROMPT) - start), **with_short})
        chunked = driver.generate("chunked", 6)
        driver.add("hit", PROMPT, shared_block_ids=driver.columns("chunked", 0, 3))
        hit = driver.generate("hit", 6)

        assert (chunked[:6], hit, driver.output_tokens("short")[:6]) == (expected, expected, short)


SMOLLM2 = {
    "hidden_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "tie_word_embeddings": True,
}
LLAMA = {"hidden_size": 64, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 8}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2 9:3": ("llama", SMOLLM2),
    "qwen2 14:2": ("qwen2", {"num_attention_heads": 14, "num_key_value_heads": 2}),
    "llama 32:8": ("llama", LLAMA),
    "qwen3 6:3": ("qwen3", {}),
    "mistral 8:2": ("mistral", {"num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 24}),
    "gemma3 4:1": ("gemma3_text", GEMMA),
    "no columns for most": ("llama", {"intermediate_size": 32, "vocab_size": 130, "head_dim": 32}),
}
ALL_SPLITS = [
    *[("smollm2 9:3", tp_size) for tp_size in range(1, 7)],
    *[("qwen2 14:2", tp_size) for tp_size in (3, 5, 6, 7)],
    *[("llama 32:8", tp_size) for tp_size in (3, 5, 6, 7)],
    *[("qwen3 6:3", tp_size) for tp_size in (2, 5)],
    *[("mistral 8:2", tp_size) for tp_size in (2, 3)],
    *[("gemma3 4:1", tp_size) for tp_size in (2, 3, 4)],
    *[("no columns for most", tp_size) for tp_size in (4, 5, 6)],
]
SAMPLE = [
    ("smollm2 9:3", 4),
    ("qwen2 14:2", 5),
    ("llama 32:8", 7),
    ("qwen3 6:3", 2),
    ("gemma3 4:1", 3),
    ("no columns for most", 6),
]


@pytest.mark.parametrize(
    ("name", "tp_size"),
    [pytest.param(*split, marks=[] if split in SAMPLE else [pytest.mark.full]) for split in ALL_SPLITS],
)
def test_any_number_of_ranks_gives_the_tokens_of_transformers(
    tmp_path: Path, name: str, tp_size: int
) -> None:
    model_type, fields = HEADS[name]
    prompts = {"long": [token % 125 for token in PROMPT], "short": [5, 77, 9]}
    reference = reference_model(write_random_model(tmp_path, model_type, **fields))
    expected = {name: reference_tokens(reference, prompt, 10) for name, prompt in prompts.items()}

    with open_ranks(tmp_path, tp_size) as driver:
        for name, prompt in prompts.items():
            driver.add(name, prompt)
        driver.generate("long", 10)

        assert {name: driver.output_tokens(name) for name in prompts} == expected


def test_the_rank_with_the_most_kv_heads_has_the_fewest_blocks(tmp_path: Path) -> None:
    write_random_model(tmp_path, "llama")
    with open_ranks(tmp_path, 2, num_blocks=None, max_num_seqs=100_000) as driver:
        kv_heads = [worker._shape.num_kv_heads for worker in driver.worker.workers]
        counted = [worker._count_kv_blocks() for worker in driver.worker.workers]

    assert kv_heads == [2, 1]
    assert counted[0] * 2 == counted[1]


def test_gemma3_reads_what_transformers_4_wrote(tmp_path: Path) -> None:
    folder = write_random_model(
        tmp_path, "gemma3_text", **{**GEMMA, "num_hidden_layers": 6, "layer_types": None}
    )
    edit_config(
        folder,
        drop=("rope_parameters", "layer_types", "_sliding_window_pattern", "dtype", "tie_word_embeddings"),
        sliding_window_pattern=3,
        rope_theta=500_000.0,
        rope_local_base_freq=5_000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        torch_dtype="bfloat16",
    )

    config = read_transformer_config(folder)

    assert config.layer_types == (LayerType.SLIDING, LayerType.SLIDING, LayerType.FULL) * 2
    assert [config.window(index) for index in range(3)] == [20, 20, None]
    assert config.rope == RopeConfig(theta=500_000.0, rope_type=RopeType.LINEAR, parameters={"factor": 8.0})
    assert config.local_rope == RopeConfig(theta=5_000.0)
    assert (config.dtype, config.tie_word_embeddings) == ("bfloat16", True)


def test_the_text_part_of_a_model_with_images_is_served(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, "gemma3_text", **GEMMA)
    expected = reference_tokens(reference_model(folder), PROMPT, 8)
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    renamed["vision_tower.embeddings.weight"] = torch.zeros(3)
    save_file(renamed, folder / "model.safetensors")
    config = (folder / "config.json").read_text(encoding="utf-8")
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": json.loads(config),
    }
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")

    with open_ranks(folder, 2) as driver:
        driver.add("a", PROMPT)
        tokens = driver.generate("a", 8)

    assert tokens == expected
    assert read_transformer_config(folder).eos_token_ids == (2, 1, 106)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "relu2"}, "'relu2' is not supported where one of these may stand: silu, gelu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' is not supported where one of these may stand"),
        ({"layer_types": ["chunked_attention"] * 2}, "'chunked_attention' is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, and num_hidden_layers is 2"),
        ({"layer_types": ["sliding_attention"] * 2}, "there are sliding layers, and sliding_window is not"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
    ],
)
def test_what_a_layer_cannot_do_is_refused_before_the_start(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = write_random_model(tmp_path, "qwen3")
    edit_config(folder, **fields)

    with pytest.raises(ConfigError, match=message):
        read_transformer_config(folder)


def test_windows_are_read_as_each_family_means_them(tmp_path: Path) -> None:
    def windows(model_type: str, drop: tuple[str, ...] = (), **fields: Any) -> list[int | None]:
        folder = write_random_model(tmp_path / model_type, model_type)
        edit_config(folder, drop=("layer_types", *drop), **fields)
        config = read_transformer_config(folder)
        return [config.window(index) for index in range(2)]

    assert windows("qwen2", drop=("use_sliding_window",), sliding_window=8) == [None, None]
    assert windows("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1) == [None, 8]
    assert windows("mistral", sliding_window=8) == [8, 8]
    assert windows("mistral", sliding_window=None) == [None, None]
    assert windows("llama", sliding_window=8) == [None, None]
