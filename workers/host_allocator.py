"""What the C library does with the memory of a large tensor that is freed: keep it.

Called by: device.py, in a process that computes on CPU. Left to itself, glibc gives each buffer of a prompt's
activations back to the kernel and asks for it again a layer later: a page fault for every 4 KiB, a sixth of the time
of a prompt. Torch-free.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h."""
MAX_KEPT_BUFFER_BYTES = 1 << 25
"""Larger ones come from the kernel and go back to it: more than glibc takes for its threshold."""
MAX_KEPT_BYTES = 1 << 28
"""Free memory at the end of the heap beyond this goes back."""


def keep_large_buffers() -> bool:
    """Have malloc keep buffers up to MAX_KEPT_BUFFER_BYTES for the next use; False: this C library can't."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return (
        mallopt is not None
        and bool(mallopt(_M_MMAP_THRESHOLD, MAX_KEPT_BUFFER_BYTES))
        and bool(mallopt(_M_TRIM_THRESHOLD, MAX_KEPT_BYTES))
    )
