"""The hook "measure_ceilings": what this rank's device can read and multiply at most.

Called by: hooks.py in the worker process, for benchmarks that print fractions of a floor (executor.hooks names it).
Takes about 3 GiB for a moment on a GPU, which memory_utilization must leave free, and a few seconds.
"""

import itertools
import statistics
import time
from collections.abc import Callable

import msgspec
import torch

from .worker import Worker

GPU_READ_BYTES, CPU_READ_BYTES = 2 << 30, 64 << 20
GPU_SIDE, CPU_SIDE = 8192, 512
NUM_TIMED, NUM_WARM_UP = 12, 3


class DeviceCeilings(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of single launches. read_bytes_per_s: of a sum over float32; matmul_flops: of a square product."""

    read_bytes_per_s: float
    matmul_flops: float


def measure_ceilings(worker: Worker, argument: None) -> DeviceCeilings:
    """Read one large buffer, and multiply two square matrices in the model's dtype."""
    device, dtype = worker.device, worker.dtype
    is_gpu = device.type == "cuda"
    read_bytes, side = (GPU_READ_BYTES, GPU_SIDE) if is_gpu else (CPU_READ_BYTES, CPU_SIDE)
    with torch.inference_mode():
        read_s = _read_s(read_bytes, device)
        matmul_s = _matmul_s(side, device, dtype)
    if is_gpu:
        torch.cuda.empty_cache()
    return DeviceCeilings(read_bytes_per_s=read_bytes / read_s, matmul_flops=2 * side**3 / matmul_s)


def _read_s(num_bytes: int, device: torch.device) -> float:
    buffer = torch.ones(num_bytes // 4, device=device)
    return _median_s(buffer.sum, device)


def _matmul_s(side: int, device: torch.device, dtype: torch.dtype) -> float:
    # Random, not zeros: a product of zeros draws less power, and runs at a higher clock.
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return _median_s(lambda: torch.mm(left, right), device)


def _median_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, by the device's own clock where it has one."""
    for _ in range(NUM_WARM_UP):
        run()
    if device.type != "cuda":
        samples = []
        for _ in range(NUM_TIMED):
            began_at = time.perf_counter()
            run()
            samples.append(time.perf_counter() - began_at)
        return statistics.median(samples)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_TIMED + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize(device)
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / 1e3
