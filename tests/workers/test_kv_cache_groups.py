"""How layers are divided into KV cache groups, and the cache that is laid out by them."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.workers.config import CacheConfig
from phalanx.workers.kv_cache_groups import MAX_GROUPS, make_kv_cache_groups
from phalanx.workers.memory import kv_cache_shape, make_kv_caches
from phalanx.workers.transformer_config import TransformerConfig, parse_config

FULL, SLIDING = "full_attention", "sliding_attention"


def make_config(layer_types: list[str]) -> TransformerConfig:
    raw: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "head_dim": 8,
        "layer_types": layer_types,
        "sliding_window": 32,
        "use_sliding_window": True,
    }
    return parse_config(raw, {})


@pytest.mark.parametrize(
    ("layer_types", "sizes"),
    [
        ([FULL] * 5, [(None, 5)]),
        ([SLIDING] * 5, [(32, 5)]),
        (([SLIDING] * 5 + [FULL]) * 2, [(None, 2), *[(32, 2)] * 5]),
        (([SLIDING] * 5 + [FULL]) * 4 + [SLIDING] * 2, [(None, 4), *[(32, 4)] * 5, (32, 2)]),
        ([SLIDING, FULL] * 5 + [FULL], [(None, 6), (32, 5)]),
    ],
)
def test_groups_are_as_large_as_the_smallest_kind(
    layer_types: list[str], sizes: list[tuple[int | None, int]]
) -> None:
    groups = make_kv_cache_groups(make_config(layer_types))

    assert [(group.window, len(group.layers)) for group in groups] == sizes


@given(st.lists(st.sampled_from([FULL, SLIDING]), min_size=1, max_size=80))
def test_every_layer_is_in_one_group_of_its_kind_and_groups_stay_few(layer_types: list[str]) -> None:
    config = make_config(layer_types)

    groups = make_kv_cache_groups(config)

    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layer_types)))
    assert all(config.window(layer) == group.window for group in groups for layer in group.layers)
    assert len(groups) <= MAX_GROUPS
    assert [group.window is None for group in groups] == sorted(
        (group.window is None for group in groups), reverse=True
    )


def test_layers_of_different_groups_share_memory_and_those_of_one_do_not() -> None:
    config = make_config([SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL])
    shape = kv_cache_shape(config, CacheConfig(block_size=4), num_kv_heads=2, dtype=torch.float32)

    caches = make_kv_caches(shape, 3, torch.device("cpu"))

    assert shape.bytes_per_block == 2 * 2 * 4 * 2 * 8 * 4
    assert [cache.group for cache in caches] == [1, 1, 0, 2, 2, 0]
    places = [cache.k.data_ptr() for cache in caches]
    assert places[0] == places[2] == places[3]
    assert places[1] == places[4] == places[5] != places[0]
