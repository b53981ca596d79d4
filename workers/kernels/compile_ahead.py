"""Triton's kernels, compiled by several threads before they are needed. For CUDA.

Called by: workers/compile_kernels.py. A kernel takes a second to compile when the disk has it not, and a model has
dozens: one after the other they would be most of the start.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import triton
from triton.runtime.jit import JITFunction


@contextmanager
def compiling_ahead(num_threads: int) -> Iterator[None]:
    """Inside, a kernel that is launched on this thread is compiled instead: what it would have written is not.

    At the end all of them are ready. Raises what the compiler raises. For one thread of a process that launches no
    kernel meanwhile.
    """

    def compile_only(self: Any, grid: object) -> Callable[..., object]:
        return partial(self.run, grid=grid, warmup=True)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as pool, triton.AsyncCompileMode(pool):
        # A launch is `kernel[grid](...)`; Triton has this way to compile, but none to take all launches that way.
        JITFunction.__getitem__ = compile_only
        try:
            yield
        finally:
            del JITFunction.__getitem__
