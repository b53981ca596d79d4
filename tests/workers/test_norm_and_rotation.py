"""Norms and rotary embedding in plain torch, against their formulas in float64."""

import pytest
import torch

from phalanx.workers.kernels.rms_norm import offset_rms_norm, rms_norm
from phalanx.workers.layers.rotary import rotate, widen_angles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 64), (3, 64), (5, 2, 7)])
@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_a_norm_divides_rows_by_their_root_mean_square(
    dtype: torch.dtype, shape: tuple[int, ...], is_offset: bool, size: float
) -> None:
    """The smallest rows show epsilon."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * size).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    given, epsilon = x.clone(), 1e-5

    result = (offset_rms_norm if is_offset else rms_norm)(x, weight, epsilon)

    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * (weight.double() + is_offset)
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    assert result.dtype == dtype
    assert torch.equal(x, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_is_turned_pair_by_pair(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 4, 8, generator=generator).to(dtype)
    angles = torch.randn(3, 1, 4, generator=generator)

    # As the models cut it: not contiguous.
    result = rotate(qkv[:, :2], *widen_angles(angles.cos(), angles.sin()))

    first, second = qkv[:, :2].double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    assert result.dtype == dtype
