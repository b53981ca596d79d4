"""Programmatic dependent launch: a kernel is brought onto the card while the one before it still ends. For CUDA.

Called by: the kernels of a decode step. Between two kernels of a stream the card does nothing for about a microsecond,
and the second one's programs take another to begin; of a few hundred kernels of a few microseconds that is a good part
of a step. A kernel that is launched so may begin before the one before it has ended, and waits for that inside itself.

What makes it safe: all programs of such a kernel call `wait_for_previous` before they read or write what other kernels
write or read. It returns when the kernel before has ended and all that it wrote can be seen; that one has itself waited
for the one before it, or was launched in the ordinary way, so all earlier ones have ended, too. The next kernel comes
onto the card when the programs of this one have ended, or have called `let_next_come`, which they do after they have
waited: so what the kernel before the one before wrote is there from the start.

Hopper and later cards have it (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"); on
others, and in Triton's interpreter, the launch is an ordinary one.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@cache
def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments with which a kernel that begins with `wait_for_previous` is launched on `device`."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        return {"IS_DEPENDENT": True, "launch_pdl": True}
    return {"IS_DEPENDENT": False}


@triton.jit
def wait_for_previous(IS_DEPENDENT: tl.constexpr):
    """Wait until the kernel before has ended, and all that it wrote can be seen."""
    if IS_DEPENDENT:
        cuda.gdc_wait()


@triton.jit
def let_next_come(IS_DEPENDENT: tl.constexpr):
    """Let the next kernel onto the card when all programs of this one have come here, not when they have ended.

    For small kernels only. The next one's programs go where there is room: beside a kernel that fills the card that
    would be wherever it ends first, a few of them on one multiprocessor and none on another.
    """
    if IS_DEPENDENT:
        cuda.gdc_launch_dependents()
