"""The hook "memory_report": how much memory one rank uses, on the host and on its device. Torch-free.

Called by: hooks.py, in the worker process, between two steps.
"""

import os
import resource
from pathlib import Path
from typing import Protocol

import msgspec


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's memory in bytes.

    allocated, reserved: by this rank's tensors; by its allocator, which keeps what tensors have freed
    free, total:         of the whole device, as the driver counts, with other processes and the driver's own part
    """

    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank holds of the model, in bytes. device: None on CPU.

    kv_cache_bytes: of the address space; on CPU a page takes memory only from its first use on
    """

    weight_bytes: int
    kv_cache_bytes: int
    device: DeviceMemory | None


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one rank.

    resident_bytes:      of the process, shared mappings included; peak: at most so far
    num_process_threads: threads of the process, those of libraries included
    """

    tp_rank: int
    pid: int
    resident_bytes: int
    peak_resident_bytes: int
    num_process_threads: int
    model: ModelMemory


class HasMemory(Protocol):
    """A worker that knows what it holds."""

    @property
    def tp_rank(self) -> int:
        """Which rank it is."""
        ...

    def model_memory(self) -> ModelMemory:
        """What it holds of the model."""
        ...


def memory_report(worker: HasMemory, argument: None) -> RankMemory:
    """Return how much memory this process and its device use."""
    resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    resident_bytes = resident_pages * resource.getpagesize()
    return RankMemory(
        tp_rank=worker.tp_rank,
        pid=os.getpid(),
        resident_bytes=resident_bytes,
        # In KiB, and brought up to date only now and then.
        peak_resident_bytes=max(resident_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        num_process_threads=len(os.listdir("/proc/self/task")),
        model=worker.model_memory(),
    )
