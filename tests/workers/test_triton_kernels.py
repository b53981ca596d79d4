"""Triton's fused kernels against their references in plain torch; on a card where there is one."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from phalanx.workers.kernels import embedding, triton_embedding
from phalanx.workers.kernels.gelu_and_mul import gelu_and_mul
from phalanx.workers.kernels.kv_cache import write_kv
from phalanx.workers.kernels.rms_norm import offset_rms_norm, rms_norm
from phalanx.workers.kernels.silu_and_mul import silu_and_mul
from phalanx.workers.kernels.triton_activation import gated_activation
from phalanx.workers.kernels.triton_few_rows import (
    FewRowsTuning,
    is_faster,
    product_in_parts,
    product_of_few_rows,
    tuning_for_parts,
)
from phalanx.workers.kernels.triton_linear import gemv, norm_gemv, silu_gemv
from phalanx.workers.kernels.triton_norm import add_rms_norm
from phalanx.workers.kernels.triton_rotary import rotate_and_store
from phalanx.workers.layers.rotary import rotate, widen_angles
from support.kernel_device import DEVICE, HAS_CARD, NARROW, relative_error, tolerance

EXAMPLES = 30 if HAS_CARD else 8
WITHOUT_SHRINKING = settings(max_examples=EXAMPLES, deadline=None, phases=[Phase.explicit, Phase.generate])
"""Shrinking in the interpreter takes minutes."""
EPSILON = 1e-6
DTYPES = st.sampled_from([torch.float32, NARROW])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@WITHOUT_SHRINKING
@given(
    rows=st.integers(0, 5), size=st.sampled_from([1, 64, 100, 576, 1024, 2560]), dtype=DTYPES,
    has_residual=st.booleans(), is_offset=st.booleans(), stride=st.integers(0, 3),
)  # fmt: skip
def test_add_and_norm(
    rows: int, size: int, dtype: torch.dtype, has_residual: bool, is_offset: bool, stride: int
) -> None:
    x = random(rows, size + stride, dtype=dtype)[:, :size]
    residual = random(rows, size, dtype=dtype, seed=1) if has_residual else None
    weight = random(size, dtype=dtype, seed=2)

    normalized, total = add_rms_norm(x, residual, weight, EPSILON, is_offset=is_offset)

    expected_total = x if residual is None else x + residual
    reference = offset_rms_norm if is_offset else rms_norm
    torch.testing.assert_close(total, expected_total, rtol=0.0, atol=0.0)
    if rows:
        expected = reference(expected_total, weight, EPSILON)
        assert relative_error(normalized, expected) < tolerance(dtype)


@WITHOUT_SHRINKING
@given(
    rows=st.integers(1, 5), parts=st.sampled_from([1, 2, 5]), size=st.sampled_from([64, 100, 1024]),
    dtype=DTYPES, is_offset=st.booleans(),
)  # fmt: skip
def test_a_norm_adds_up_parts(rows: int, parts: int, size: int, dtype: torch.dtype, is_offset: bool) -> None:
    sums = random(parts, rows, size)
    residual, weight = random(rows, size, dtype=dtype, seed=1), random(size, dtype=dtype, seed=2)

    normalized, total = add_rms_norm(sums, residual, weight, EPSILON, is_offset=is_offset)

    expected_total = sums.sum(0).to(dtype) + residual
    expected = (offset_rms_norm if is_offset else rms_norm)(expected_total, weight, EPSILON)
    assert (normalized.dtype, total.dtype) == (dtype, dtype)
    assert relative_error(total, expected_total) < tolerance(dtype)
    assert relative_error(normalized, expected) < tolerance(dtype)


@WITHOUT_SHRINKING
@given(
    rows=st.one_of(st.integers(1, 64), st.sampled_from([16, 17, 32, 33, 64])),
    outputs=st.sampled_from([64, 192, 200]), inputs=st.sampled_from([64, 200, 1024]),
    parts=st.sampled_from([1, 2, 4]), tile=st.sampled_from([64, 128]),
)  # fmt: skip
def test_the_parts_of_a_product_add_up_to_it(
    rows: int, outputs: int, inputs: int, parts: int, tile: int
) -> None:
    x, weight = random(rows, inputs, dtype=NARROW), random(outputs, inputs, dtype=NARROW, seed=1)
    tuning = FewRowsTuning(parts=parts, outputs=tile, inputs=64, num_stages=3)

    sums = product_in_parts(x, weight, tuning)

    assert sums.shape == (parts, rows, outputs)
    assert relative_error(sums.double().sum(0), x.double() @ weight.double().T) < 1e-5


@WITHOUT_SHRINKING
@given(
    rows=st.one_of(st.integers(1, 64), st.sampled_from([16, 17, 32, 33, 64])),
    outputs=st.sampled_from([64, 192, 200]), inputs=st.sampled_from([64, 200, 1024]), tile=st.sampled_from([64, 128]),
)  # fmt: skip
def test_a_product_of_few_rows(rows: int, outputs: int, inputs: int, tile: int) -> None:
    x, weight = random(rows, inputs, dtype=NARROW), random(outputs, inputs, dtype=NARROW, seed=1)

    out = product_of_few_rows(x, weight, FewRowsTuning(outputs=tile, inputs=64, num_stages=3))

    assert (out.dtype, out.shape) == (NARROW, (rows, outputs))
    assert relative_error(out, x.double() @ weight.double().T) < tolerance(NARROW)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "is_ours"),
    [
        (5, 4096, 1024, True),
        (64, 4096, 1024, True),
        (64, 6144, 1024, True),
        (32, 6144, 4096, True),
        (33, 6144, 4096, False),
        (4, 4096, 1024, False),
        (65, 4096, 1024, False),
        (8, 28672, 4096, False),
        (8, 2048, 1024, False),
        (8, 4096, 1026, False),
    ],
)
def test_whole_products_of_few_rows_are_for_what_was_measured(
    rows: int, outputs: int, inputs: int, is_ours: bool
) -> None:
    assert is_faster(rows, outputs, inputs) == is_ours


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "parts"),
    [
        (64, 1024, 2048, 8),
        (16, 1024, 3072, 8),
        (5, 4096, 14336, 2),
        (64, 2048, 8192, 4),
        (64, 576, 1536, 6),
        (4, 1024, 2048, None),
        (65, 1024, 2048, None),
        (64, 4096, 4096, 2),
        (64, 1024, 1024, None),
        (64, 8192, 28672, None),
        (64, 64, 128, None),
        (64, 1024, 3075, None),
    ],
)
def test_the_columns_of_few_outputs_are_dealt_out(
    rows: int, outputs: int, inputs: int, parts: int | None
) -> None:
    tuning = tuning_for_parts(rows, outputs, inputs)

    assert (tuning.parts if tuning is not None else None) == parts


@WITHOUT_SHRINKING
@given(
    tokens=st.integers(0, 5),
    size=st.sampled_from([0, 1, 100, 1024, 1536, 3000]),
    dtype=DTYPES,
    is_gelu=st.booleans(),
)
def test_gated_activation(tokens: int, size: int, dtype: torch.dtype, is_gelu: bool) -> None:
    x = random(tokens, 2 * size, dtype=dtype)

    result = gated_activation(x, is_gelu=is_gelu)

    expected = (gelu_and_mul if is_gelu else silu_and_mul)(x)
    assert result.shape == expected.shape
    if expected.numel():
        assert relative_error(result, expected) < tolerance(dtype)


@WITHOUT_SHRINKING
@given(
    tokens=st.integers(0, 6),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (16, 8), (9, 3), (64, 1)]),
    head_size=st.sampled_from([64, 80, 128, 256]),
    dtype=DTYPES,
    norm=st.sampled_from([None, "plain", "offset"]),
    block_size=st.sampled_from([1, 16, 64]),
)
def test_rotate_and_store(
    tokens: int, heads: tuple[int, int], head_size: int, dtype: torch.dtype, norm: str | None, block_size: int
) -> None:
    num_heads, kv_heads = heads
    qkv = random(tokens, num_heads + 2 * kv_heads, head_size, dtype=dtype)
    cos, sin = random(tokens, 2, head_size // 2, seed=1).split(1, dim=1)
    weights = [random(head_size, dtype=dtype, seed=seed) for seed in (2, 3)]
    caches = [
        random(8, kv_heads, block_size, head_size, dtype=dtype, seed=4).transpose(1, 2) for _ in range(2)
    ]
    expected_caches = [cache.contiguous() for cache in caches]
    num_slots = 8 * block_size
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(5))[:tokens].to(DEVICE)
    # The last token is padding: it has no slot.
    slots[-1:] = -1

    queries = rotate_and_store(
        qkv, cos, sin, *caches, slots, num_heads=num_heads, epsilon=EPSILON,
        q_weight=None if norm is None else weights[0], k_weight=None if norm is None else weights[1],
        is_offset=norm == "offset",
    )  # fmt: skip

    q, k, v = qkv.split((num_heads, kv_heads, kv_heads), dim=1)
    if norm is not None:
        reference = offset_rms_norm if norm == "offset" else rms_norm
        q, k = reference(q, weights[0], EPSILON), reference(k, weights[1], EPSILON)
    factors = widen_angles(cos, sin)
    q, k = rotate(q, *factors), rotate(k, *factors)
    write_kv(k[:-1], v[:-1], *expected_caches, slots[:-1])
    if tokens:
        assert relative_error(queries, q) < tolerance(dtype)
    assert relative_error(caches[0], expected_caches[0]) < tolerance(dtype)
    torch.testing.assert_close(caches[1].contiguous(), expected_caches[1], rtol=0.0, atol=0.0)


@WITHOUT_SHRINKING
@given(
    tokens=st.integers(0, 6),
    size=st.sampled_from([1, 100, 1024, 1100]),
    first_row=st.sampled_from([0, 7, 40]),
)
def test_embedding_of_a_ranks_own_rows(tokens: int, size: int, first_row: int) -> None:
    weight = random(20, size)
    ids = torch.randint(0, 60, (tokens,), generator=torch.Generator().manual_seed(tokens)).to(DEVICE)

    result = triton_embedding.embed_own_rows(ids, weight, first_row)

    expected = embedding.embed_own_rows(ids, weight, first_row)
    torch.testing.assert_close(result, expected, rtol=0.0, atol=0.0)


@WITHOUT_SHRINKING
@given(
    rows=st.integers(1, 4), outputs=st.sampled_from([1, 7, 34]), inputs=st.sampled_from([1, 64, 100, 576, 2048]),
    dtype=DTYPES, has_bias=st.booleans(),
)  # fmt: skip
def test_gemv(rows: int, outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2) if has_bias else None

    result = gemv(x, weight, bias)

    assert relative_error(result, _product(x, weight, bias)) < tolerance(dtype)


@WITHOUT_SHRINKING
@given(
    rows=st.integers(1, 4), outputs=st.sampled_from([1, 7, 34]), inputs=st.sampled_from([64, 100, 1100]),
    dtype=DTYPES, has_residual=st.booleans(), is_offset=st.booleans(), has_bias=st.booleans(),
)  # fmt: skip
def test_gemv_of_a_norm(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    has_residual: bool,
    is_offset: bool,
    has_bias: bool,
) -> None:
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    residual = random(rows, inputs, dtype=dtype, seed=2) if has_residual else None
    norm_weight = random(inputs, dtype=dtype, seed=3)
    bias = random(outputs, dtype=dtype, seed=4) if has_bias else None

    result, total = norm_gemv(x, residual, norm_weight, EPSILON, weight, bias, is_offset=is_offset)

    expected_total = x if residual is None else x + residual
    normalized = (offset_rms_norm if is_offset else rms_norm)(expected_total, norm_weight, EPSILON)
    torch.testing.assert_close(total, expected_total, rtol=0.0, atol=0.0)
    assert relative_error(result, _product(normalized, weight, bias)) < tolerance(dtype)


@WITHOUT_SHRINKING
@given(
    rows=st.integers(1, 4), outputs=st.sampled_from([1, 7, 34]), inputs=st.sampled_from([64, 100, 1100]),
    dtype=DTYPES, has_bias=st.booleans(),
)  # fmt: skip
def test_gemv_of_a_gated_activation(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool
) -> None:
    gate_up, weight = random(rows, 2 * inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2) if has_bias else None

    result = silu_gemv(gate_up, weight, bias)

    assert relative_error(result, _product(silu_and_mul(gate_up), weight, bias)) < tolerance(dtype)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result = x.double() @ weight.double().T
    return result if bias is None else result + bias.double()


@pytest.mark.parametrize("rows", [0, 5])
def test_gemv_takes_one_to_four_rows(rows: int) -> None:
    with pytest.raises(AssertionError):
        gemv(random(rows, 64), random(8, 64))
