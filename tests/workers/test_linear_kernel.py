"""A packed weight gives the products of the plain one."""

import pytest
import torch
import torch.nn.functional as F

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
    result = linear(x, packed, bias)

    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(result, F.linear(x, weight, bias), atol=tolerance, rtol=tolerance)


def test_an_empty_weight_stays_as_it_is() -> None:
    weight = torch.empty(8, 0)

    assert pack_weight(weight) is None
    assert linear(torch.empty(3, 0), weight).tolist() == [[0.0] * 8] * 3


def test_float16_blocks_hold_bfloat16_weights_exactly() -> None:
    """From 2^-17 on; a row of one weight shows each of them."""
    exponents = torch.arange(-17, 16, dtype=torch.float32)
    mantissas = 1.0 + torch.arange(128, dtype=torch.float32) / 128
    weight = torch.outer(2.0**exponents, mantissas).reshape(-1, 1).bfloat16()

    product = HalfWeight(weight).product(torch.ones(1, 1, dtype=torch.bfloat16), None)

    assert torch.equal(product.flatten(), weight.flatten())


@pytest.mark.parametrize("number", [65536.0, float("inf"), float("nan")])
def test_float16_blocks_are_not_for_numbers_they_cannot_hold(number: float) -> None:
    assert not HalfWeight.can_hold(torch.tensor([[1.0, -number]], dtype=torch.bfloat16))
