"""Keyword arguments of LLM: every setting by its own name."""

from dataclasses import fields

import pytest

from phalanx.engine.engine_options import SECTIONS, make_engine_config
from phalanx.shm.errors import ConfigError
from phalanx.workers.config import DType


def test_no_two_sections_share_the_name_of_a_field():
    names = [field.name for kind in SECTIONS.values() for field in fields(kind)]

    assert len(names) == len(set(names))


def test_settings_go_to_their_sections(tmp_path):
    config = make_engine_config(
        tmp_path, tensor_parallel_size=2, dtype="bfloat16", num_blocks=9, max_num_seqs=3
    )

    assert config.model.path == str(tmp_path)
    assert config.model.dtype is DType.BFLOAT16
    assert (config.parallel.tensor_parallel_size, config.cache.num_blocks, config.scheduler.max_num_seqs) == (
        2,
        9,
        3,
    )


def test_defaults_are_those_of_the_device(tmp_path):
    on_cpu = make_engine_config(tmp_path, device="cpu")
    on_gpu = make_engine_config(tmp_path, device="cuda")
    as_said = make_engine_config(tmp_path, device="cuda", block_size=16, max_num_batched_tokens=512)

    assert (on_cpu.cache.block_size, on_cpu.scheduler.max_num_batched_tokens) == (16, 2048)
    assert (on_gpu.cache.block_size, on_gpu.scheduler.max_num_batched_tokens) == (64, 16640)
    assert (as_said.cache.block_size, as_said.scheduler.max_num_batched_tokens) == (16, 512)


@pytest.mark.parametrize(
    ("override", "field", "problem"),
    [
        ({"num_blcks": 9}, "num_blcks", "known are"),
        ({"path": "x"}, "path", "known are"),
        ({"num_blocks": "many"}, "cache.num_blocks", "int"),
        ({"num_blocks": 1}, "cache.num_blocks", "at least 2"),
        ({"dtype": "int3"}, "model.dtype", "int3"),
    ],
)
def test_a_wrong_setting_names_itself(tmp_path, override, field, problem):
    with pytest.raises(ConfigError) as caught:
        make_engine_config(tmp_path, **override)

    assert caught.value.field == field
    assert problem in caught.value.problem
