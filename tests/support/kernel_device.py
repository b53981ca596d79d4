"""Where the tests of Triton's kernels run: on the card where there is one, else in Triton's interpreter on the CPU.

The interpreter is chosen in tests/conftest.py, before anything imports Triton. It multiplies no bfloat16.
"""

from pathlib import Path

import torch

HAS_CARD = Path("/dev/nvidiactl").exists()
DEVICE = "cuda" if HAS_CARD else "cpu"
NARROW = torch.bfloat16 if HAS_CARD else torch.float16
"""The 16-bit type to test with."""

if HAS_CARD:
    # Opened by the first test, its descriptors would count as that test's leak.
    torch.zeros(1, device=DEVICE)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN anywhere gives NaN, which is below nothing."""
    difference = (result.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


def tolerance(dtype: torch.dtype) -> float:
    """The relative error that results in this type may have."""
    return {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
