"""A packed weight gives the products of the plain one."""

import pytest
import torch
import torch.nn.functional as F

from phalanx.workers.kernels.linear import linear, pack_weight


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

    result = linear(x, pack_weight(weight), bias)

    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(result, F.linear(x, weight, bias), atol=tolerance, rtol=tolerance)


def test_an_empty_weight_stays_as_it_is() -> None:
    weight = torch.empty(8, 0)

    assert pack_weight(weight) is weight
    assert linear(torch.empty(3, 0), weight).tolist() == [[0.0] * 8] * 3
