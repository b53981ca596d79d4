"""Loading checkpoints: whole, in several files, dummy, and wrong ones."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from phalanx.shm.errors import ConfigError
from phalanx.workers.config import LoadFormat
from phalanx.workers.device_upload import chunks
from phalanx.workers.errors import WeightsError
from phalanx.workers.models.llama import LlamaForCausalLM
from phalanx.workers.partition import make_partition
from phalanx.workers.tp_group import SingleRankGroup
from phalanx.workers.transformer_config import read_transformer_config
from phalanx.workers.weights import load_weights
from support.model_steps import make_worker
from support.tiny_models import llama_config, write_config, write_tiny_llama

Tensors = dict[str, torch.Tensor]


def build(folder: Path, *, tp_size: int = 1, tp_rank: int = 0) -> LlamaForCausalLM:
    config = read_transformer_config(folder)
    partition = make_partition(config, tp_size=tp_size, tp_rank=tp_rank)
    with torch.device("meta"):
        model = LlamaForCausalLM(config, partition, SingleRankGroup(), torch.float32, max_positions=64)
    model.to_empty(device="cpu")
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path, attention_bias=True, tie_word_embeddings=False)


def change(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("tp_size", [1, 2, 3, 5])
def test_the_ranks_together_hold_every_tensor(folder: Path, tp_size: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    seen = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}

    for tp_rank in range(tp_size):
        model = build(folder, tp_size=tp_size, tp_rank=tp_rank)
        load_weights(model, str(folder), LoadFormat.AUTO)
        for shard in model.shards():
            if shard.span is None or shard.dim is None:
                seen[shard.name].copy_(shard.target)
            else:
                seen[shard.name].narrow(shard.dim, shard.span.start, shard.span.size).copy_(shard.target)

    for name, tensor in tensors.items():
        assert torch.equal(seen[name], tensor), name


def test_a_checkpoint_in_two_files_is_read_through_its_index(folder: Path) -> None:
    expected = build(folder)
    load_weights(expected, str(folder), LoadFormat.AUTO)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file_name, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file_name)
    weight_map = {name: file_name for file_name, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    model = build(folder)
    num_bytes = load_weights(model, str(folder), LoadFormat.AUTO)

    assert num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks the tensor model\.norm\.weight"),
        (lambda t: t.update(extra=torch.zeros(2)), "no place for, among them extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(7)}),
            r"model\.norm\.weight has the shape \(7,\), and should have \(48,\)",
        ),
    ],
    ids=["missing", "unexpected", "wrong shape"],
)
def test_a_wrong_checkpoint_names_the_tensor(
    folder: Path, edit: Callable[[Tensors], object], message: str
) -> None:
    change(folder, edit)

    with pytest.raises(WeightsError, match=message):
        load_weights(build(folder), str(folder), LoadFormat.AUTO)


def test_old_checkpoints_may_hold_frequencies(folder: Path) -> None:
    change(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))

    load_weights(build(folder), str(folder), LoadFormat.AUTO)


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    write_config(tmp_path, llama_config())

    with pytest.raises(WeightsError, match=r"holds neither model\.safetensors nor"):
        load_weights(build(tmp_path), str(tmp_path), LoadFormat.AUTO)


def test_a_file_that_was_cut_short_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])

    with pytest.raises(WeightsError, match=r"cannot read .*model\.safetensors"):
        load_weights(build(folder), str(folder), LoadFormat.AUTO)


def test_dummy_weights_do_not_depend_on_the_split(tmp_path: Path) -> None:
    write_config(tmp_path, llama_config())
    whole = build(tmp_path)
    load_weights(whole, str(tmp_path), LoadFormat.DUMMY)
    reference = {shard.name: shard.target for shard in whole.shards()}

    for tp_rank in range(2):
        model = build(tmp_path, tp_size=2, tp_rank=tp_rank)
        load_weights(model, str(tmp_path), LoadFormat.DUMMY)
        for shard in model.shards():
            part = reference[shard.name]
            if shard.span is not None and shard.dim is not None:
                part = part.narrow(shard.dim, shard.span.start, shard.span.size)
            assert torch.equal(shard.target, part), shard.name

    embedding = reference["model.embed_tokens.weight"]
    assert 0.9e-3 < float(embedding.abs().max()) <= 1e-3
    assert abs(float(embedding.mean())) < 2e-5
    first, second = (reference[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in range(2))
    assert not torch.equal(first, second)


def test_an_unknown_architecture_lists_those_that_there_are(tmp_path: Path) -> None:
    write_config(tmp_path, {**llama_config(), "architectures": ["GPT2LMHeadModel"]})

    with pytest.raises(
        ConfigError, match=r"GPT2LMHeadModel is not supported; supported: .*LlamaForCausalLM, Mistral"
    ):
        make_worker(tmp_path).start()


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    element_bytes=st.sampled_from([1, 2, 4]),
    max_bytes=st.integers(1, 500),
)
def test_the_pieces_of_an_upload_cover_a_tensor_once(
    shape: list[int], element_bytes: int, max_bytes: int
) -> None:
    pieces = list(chunks(torch.Size(shape), element_bytes, max_bytes))

    rows = [row for first, num_rows in pieces for row in range(first, first + num_rows)]
    assert rows == list(range(shape[0]))
    row_bytes = math.prod(shape[1:]) * element_bytes
    assert all(num_rows == 1 or num_rows * row_bytes <= max_bytes for _, num_rows in pieces)
