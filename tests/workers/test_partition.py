"""Every split covers the model exactly once."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.shm.errors import ConfigError
from phalanx.workers.partition import make_partition
from phalanx.workers.span import Span
from phalanx.workers.transformer_config import Activation, LayerType, RopeConfig, TransformerConfig

SMOLLM2 = TransformerConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100000.0),
    layer_types=(LayerType.FULL,) * 30,
    hidden_act=Activation.SILU,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
    dtype="bfloat16",
)


def covers_exactly(spans: list[Span], total: int) -> bool:
    covered = [index for span in spans for index in range(span.start, span.stop)]
    return covered == list(range(total))


@given(
    num_kv_heads=st.integers(1, 12),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([16, 64, 128]),
    intermediate_size=st.integers(1, 900),
    vocab_size=st.integers(1, 2000),
    data=st.data(),
)
def test_every_split_covers_the_model_exactly_once(
    num_kv_heads: int, group: int, head_dim: int, intermediate_size: int, vocab_size: int, data: st.DataObject
) -> None:
    num_heads = num_kv_heads * group
    tp_size = data.draw(st.integers(1, num_heads))
    config = replace(
        SMOLLM2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
    )

    shares = make_partition(config, tp_size=tp_size, tp_rank=0).shares

    assert len(shares) == tp_size
    assert covers_exactly([share.query_heads for share in shares], num_heads)
    assert covers_exactly([share.mlp_columns for share in shares], intermediate_size)
    assert covers_exactly([share.vocab_rows for share in shares], vocab_size)
    assert all(share.vocab_rows.start % 64 == 0 for share in shares if share.vocab_rows.size)
    if tp_size <= num_kv_heads:
        assert covers_exactly([share.kv_heads for share in shares], num_kv_heads)
    for share in shares:
        assert share.query_heads.size > 0
        assert share.query_heads.size == share.group_size * share.kv_heads.size
        for local, query in enumerate(range(share.query_heads.start, share.query_heads.stop)):
            assert share.kv_heads.start + local // share.group_size == query // group


def test_three_kv_heads_on_two_ranks_are_two_and_one() -> None:
    first, second = make_partition(SMOLLM2, tp_size=2, tp_rank=1).shares

    assert (first.kv_heads.size, first.query_heads.size) == (2, 6)
    assert (second.kv_heads.size, second.query_heads.size) == (1, 3)
    assert first.mlp_columns.size < second.mlp_columns.size


def test_ranks_hold_even_bytes() -> None:
    shares = make_partition(SMOLLM2, tp_size=4, tp_rank=0).shares

    weights = [
        2 * 64 * (share.query_heads.size + share.kv_heads.size) + 3 * share.mlp_columns.size
        for share in shares
    ]

    assert max(weights) - min(weights) <= 3 * 16


def test_a_rank_rich_in_heads_may_hold_no_columns() -> None:
    config = replace(SMOLLM2, intermediate_size=16)

    shares = make_partition(config, tp_size=2, tp_rank=0).shares

    assert [share.mlp_columns.size for share in shares] == [0, 16]


def test_more_ranks_than_heads_names_the_limit() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tensor_parallel_size: must be at most 9"):
        make_partition(SMOLLM2, tp_size=10, tp_rank=0)
