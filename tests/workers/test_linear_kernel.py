"""A packed weight gives the products of the plain one."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from phalanx.workers.kernels.linear import linear, pack_weight
from phalanx.workers.kernels.packed_weight import HalfWeight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 8, 77])
@pytest.mark.parametrize("shape", [(96, 64), (17, 33), (1, 1)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_weight_gives_the_same_products(
    dtype: torch.dtype, num_rows: int, shape: tuple[int, int], has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    x = torch.randn(num_rows, shape[1], generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype) if has_bias else None

    packed = pack_weight(weight)
    assert packed is not None
    result = packed.product(x, bias)

    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(result, F.linear(x, weight, bias), atol=tolerance, rtol=tolerance)


def test_an_empty_weight_stays_as_it_is() -> None:
    weight = torch.empty(8, 0)

    assert pack_weight(weight) is None
    assert linear(torch.empty(3, 0), weight).tolist() == [[0.0] * 8] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("largest", [2.0**-84, 0.5, 3.0, 65280.0, 2.0**100])
def test_float16_blocks_hold_weights_of_bfloat16_exactly(dtype: torch.dtype, largest: float) -> None:
    """Down to 2^-31 of the largest; a row of one weight shows each of them."""
    exponents = torch.arange(-31, 0, dtype=torch.float32)
    mantissas = 1.0 + torch.arange(128, dtype=torch.float32) / 128
    numbers = torch.outer(2.0**exponents, mantissas).reshape(-1, 1).double() * largest
    weight = torch.cat([torch.tensor([[largest]]).double(), numbers]).bfloat16().to(dtype)
    weight = weight[weight.float().abs().squeeze(1) >= largest * 2.0**-31]
    assert HalfWeight.takes(weight)

    product = HalfWeight(weight).product(torch.ones(1, 1, dtype=dtype), None)

    assert torch.equal(product.flatten(), weight.flatten())


@given(
    numbers=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=6, max_size=6),
    make_half=st.booleans(),
)
def test_float32_weights_become_float16_blocks_only_if_sums_cannot_tell(
    numbers: list[float], make_half: bool
) -> None:
    weight = torch.tensor(numbers).view(2, 3)
    if make_half:
        weight = weight.half().nan_to_num(posinf=1.0, neginf=-1.0).float()
    half_a_unit = torch.finfo(torch.float32).eps / 2

    if HalfWeight.takes(weight):
        columns = HalfWeight(weight).product(torch.eye(3), None).t()
        error = (columns.double() - weight.double()).abs()
        assert (error <= half_a_unit * weight.double().abs().amax(dim=1, keepdim=True)).all()
    else:
        assert not make_half


def test_a_row_that_float16_would_blur_keeps_its_weight_in_float32() -> None:
    """Exact numbers beside a much larger one in another row, which moves them out of float16's reach."""
    weight = torch.tensor([[1.0, 0.5], [2.0**-30, 1.25 * 2.0**-33]])
    assert HalfWeight.takes(weight[1:])

    assert not HalfWeight.takes(weight * torch.tensor([[4096.0], [1.0]]))


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float16_blocks_are_not_for_numbers_they_cannot_hold(number: float, dtype: torch.dtype) -> None:
    assert not HalfWeight.takes(torch.tensor([[1.0, -number]], dtype=dtype))


def test_a_weight_that_cannot_be_packed_meets_activations_of_another_type() -> None:
    weight = torch.tensor([[1.0, -float("inf")], [2.0, 0.5]], dtype=torch.bfloat16)

    assert linear(torch.tensor([[1.0, 2.0]]), weight).tolist() == [[-float("inf"), 3.0]]
