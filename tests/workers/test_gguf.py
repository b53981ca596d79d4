"""GGUF files: number formats and layout against the `gguf` package, models against transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import logging

from phalanx.shm.errors import ConfigError
from phalanx.workers.gguf_checkpoint import GgufCheckpoint
from phalanx.workers.gguf_file import open_gguf
from phalanx.workers.gguf_quants import FORMATS, GgufType, dequantize
from phalanx.workers.span import Span
from phalanx.workers.transformer_config import read_transformer_config
from support.gguf_models import write_gguf_twin
from support.random_models import reference_model, reference_tokens, write_random_model
from support.ranks import open_ranks

PROMPT = [(7 * index * index + 3 * index) % 320 + 3 for index in range(60)]
# Rows of whole blocks of 32 numbers.
WIDE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "head_dim": 16}
GEMMA: dict[str, Any] = {
    **WIDE,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "num_hidden_layers": 6,
    "sliding_window": 20,
    "query_pre_attn_scalar": 24,
}
MODELS: dict[str, tuple[str, dict[str, Any], GGMLQuantizationType]] = {
    "llama Q4_0": ("llama", WIDE, GGMLQuantizationType.Q4_0),
    "llama Q8_0, tied": ("llama", {**WIDE, "tie_word_embeddings": True}, GGMLQuantizationType.Q8_0),
    "qwen2 Q4_1": ("qwen2", {**WIDE, "tie_word_embeddings": True}, GGMLQuantizationType.Q4_1),
    "qwen3 F16": ("qwen3", WIDE, GGMLQuantizationType.F16),
    "gemma3 Q8_0": ("gemma3_text", GEMMA, GGMLQuantizationType.Q8_0),
}
SCALE_BYTES = {
    GgufType.Q4_0: 2,
    GgufType.Q4_1: 4,
    GgufType.Q5_0: 2,
    GgufType.Q5_1: 4,
    GgufType.Q8_0: 2,
    GgufType.Q4_K: 4,
    GgufType.Q5_K: 4,
    GgufType.Q6_K: -2,
}
"""How many bytes of a block, from its beginning or its end, are its float16 scales."""


@pytest.fixture(scope="module", autouse=True)
def no_progress_bars() -> Iterator[None]:
    """A progress bar of transformers leaves a thread behind."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def random_blocks(kind: GgufType, num_rows: int, blocks_per_row: int, seed: int) -> np.ndarray:
    """[num_rows, bytes] of valid blocks with every bit pattern but in the scales, which are near one."""
    random = np.random.default_rng(seed)
    num_bytes = FORMATS[kind].num_bytes
    blocks = random.integers(0, 256, (num_rows * blocks_per_row, num_bytes), dtype=np.uint8)
    count = SCALE_BYTES.get(kind, num_bytes)
    where = slice(0, count) if count > 0 else slice(count, None)
    dtype = {GgufType.F32: np.float32}.get(kind, np.float16)
    scales = random.normal(0, 1, (len(blocks), abs(count) // dtype().itemsize)).astype(dtype)
    if kind is not GgufType.BF16:
        blocks[:, where] = scales.view(np.uint8)
    else:
        blocks[:, 1] = 0x3F
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", list(GgufType), ids=lambda kind: kind.name)
def test_every_format_is_decoded_as_the_gguf_package_does(kind: GgufType) -> None:
    data = random_blocks(kind, 5, 3, seed=int(kind))

    ours = dequantize(data, kind)

    expected = quants.dequantize(data, GGMLQuantizationType(kind))
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(list(GgufType)),
    dim=st.sampled_from([0, 1]),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_a_part_of_a_tensor_is_that_part_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, kind: GgufType, dim: int, cut: tuple[float, float]
) -> None:
    path = tmp_path_factory.mktemp("gguf") / "one.gguf"
    data = random_blocks(kind, 6, 3, seed=1)
    writer = GGUFWriter(path, "llama")
    # For the package a tensor of plain numbers has their type, a quantised one is bytes.
    plain = {GgufType.F32: np.float32, GgufType.F16: np.float16}.get(kind)
    writer.add_tensor(
        "one", data.view(plain) if plain else data, raw_dtype=None if plain else GGMLQuantizationType(kind)
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    whole = file.read("one")
    start, stop = sorted(int(part * whole.shape[dim]) for part in cut)

    part = file.read("one", dim=dim, span=Span(start=start, size=stop - start))

    np.testing.assert_array_equal(part, whole[start:stop] if dim == 0 else whole[:, start:stop])


@pytest.mark.parametrize("tp_size", [1, 5])
@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_the_tokens_of_its_dequantised_weights(tmp_path: Path, name: str, tp_size: int) -> None:
    model_type, fields, kind = MODELS[name]
    folder = write_random_model(tmp_path / "model", model_type, **fields)
    write_gguf_twin(folder, tmp_path / "model.gguf", kind)
    expected = reference_tokens(reference_model(folder), PROMPT, 12)

    with open_ranks(tmp_path / "model.gguf", min(tp_size, fields["num_attention_heads"])) as driver:
        driver.add("a", PROMPT)
        tokens = driver.generate("a", 12)

    assert tokens == expected


@pytest.mark.parametrize("name", MODELS)
def test_a_file_and_its_folder_describe_the_same_model(tmp_path: Path, name: str) -> None:
    model_type, fields, kind = MODELS[name]
    folder = write_random_model(tmp_path / "model", model_type, **fields)
    write_gguf_twin(folder, tmp_path / "model.gguf", kind)

    ours, theirs = read_transformer_config(tmp_path / "model.gguf"), read_transformer_config(folder)

    for field in (
        "architecture",
        "vocab_size",
        "head_dim",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope",
        "local_rope",
        "layer_types",
        "hidden_act",
        "tie_word_embeddings",
        "eos_token_ids",
    ):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert [ours.window(i) for i in range(2)] == [theirs.window(i) for i in range(2)]


def test_llama3_scaling_is_read_from_its_tensor(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = write_random_model(tmp_path / "model", "llama", **WIDE, rope_parameters=rope)
    reference = reference_model(folder)
    plain = 10000.0 ** -(np.arange(0, 16, 2, dtype=np.float32) / 16)
    divisors = plain / reference.model.rotary_emb.inv_freq.numpy()
    write_gguf_twin(folder, tmp_path / "model.gguf", GGMLQuantizationType.F32, rope_divisors=divisors)

    with open_ranks(tmp_path / "model.gguf", 1) as driver:
        driver.add("a", PROMPT)
        tokens = driver.generate("a", 12)

    assert tokens == reference_tokens(reference, PROMPT, 12)
    assert read_transformer_config(tmp_path / "model.gguf").dtype == "float32"


@pytest.mark.parametrize(
    ("cut", "message"),
    [(3, "does not begin with 'GGUF'"), (100, "cannot read .*as a GGUF file"), (-40, "it was cut short")],
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, cut: int, message: str) -> None:
    folder = write_random_model(tmp_path / "model", "llama", **WIDE)
    path = tmp_path / "model.gguf"
    write_gguf_twin(folder, path, GGMLQuantizationType.Q8_0)
    path.write_bytes(path.read_bytes()[:cut])

    with pytest.raises(ConfigError, match=message):
        read_transformer_config(path)


def test_another_architecture_lists_those_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    with pytest.raises(ConfigError, match="architecture mamba are not supported; supported: gemma3, llama"):
        GgufCheckpoint(open_gguf(path))
