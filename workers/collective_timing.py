"""The hook "time_all_reduce": what a sum over the ranks costs, by length and by the way it takes.

Called by: hooks.py in every rank's process at the same time, for `cluster-bench multi-gpu` (executor.hooks names it).
On a GPU the time is that of a CUDA graph of many sums, so that no launch is in it.

When a peer dies: as its group (tp_group.py).
"""

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group

from .nccl_group import NcclGroup
from .process_group import connect_gloo
from .tp_group import TensorParallelGroup
from .worker import Worker

NUM_IN_GRAPH = 32
NUM_TIMED, NUM_WARM_UP = 7, 2

AllReduce = Callable[[torch.Tensor], torch.Tensor]


class AllReducePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to time.

    sizes:  bytes of the tensor on each rank
    is_own: the ways that this project has, or those of others beside them: what hangs in these must not take the
            numbers of ours along
    """

    sizes: list[int]
    is_own: bool = True


class AllReduceTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One way at one length.

    us:       median microseconds of one sum; None: it cannot be had, and `problem` says why
    is_exact: the sum of small whole numbers came out right
    bits:     digest of the sum of random numbers, to compare between the ranks
    """

    way: str
    num_bytes: int
    us: float | None = None
    is_exact: bool = False
    bits: str = ""
    problem: str = ""


def time_all_reduce(worker: Worker, argument: AllReducePlan) -> list[AllReduceTiming]:
    """Time every way that these ranks have, at every length."""
    ways = _own_ways(worker) if argument.is_own else _other_ways(worker)
    timings = []
    with torch.inference_mode():
        for way, make in ways:
            for num_bytes in argument.sizes:
                num_elements = num_bytes // worker.dtype.itemsize
                try:
                    timings.append(_time(worker, way, num_bytes, make(num_elements)))
                # A way that this torch or driver does not have fails in its own way, on all ranks.
                except (RuntimeError, ValueError, AttributeError, ImportError) as error:
                    problem = str(error).partition("\n")[0] or type(error).__name__
                    timings.append(AllReduceTiming(way=way, num_bytes=num_bytes, problem=problem))
    return timings


def _own_ways(worker: Worker) -> Iterator[tuple[str, Callable[[int], AllReduce]]]:
    """Name the ways; each gives, for a number of elements, the function that sums."""
    group = worker.group
    yield f"as served ({group.name})", lambda _: group.all_reduce
    if isinstance(group, NcclGroup):
        yield "nccl", lambda _: group.all_reduce_by_nccl
        if group.one_shot is not None:
            one_shot = group.one_shot
            yield (
                "one-shot",
                lambda num_elements: _within(one_shot.max_bytes, worker, num_elements, one_shot.all_reduce),
            )


def _other_ways(worker: Worker) -> Iterator[tuple[str, Callable[[int], AllReduce]]]:
    group = worker.group
    if isinstance(group, NcclGroup):
        symmetric = _SymmetricMemory(worker, group)
        yield "symmetric memory, one-shot", symmetric.one_shot
        yield "symmetric memory, two-shot", symmetric.two_shot
    elif worker.rendezvous is not None and group.size > 1 and worker.device.type == "cpu":
        store = dist.PrefixStore("all-reduce-timing", dist.FileStore(worker.rendezvous, group.size))
        gloo = connect_gloo(store, rank=group.rank, size=group.size)
        yield "gloo", lambda _: gloo.all_reduce
        gloo.close()


def _within(max_bytes: int, worker: Worker, num_elements: int, all_reduce: AllReduce) -> AllReduce:
    if num_elements * worker.dtype.itemsize > max_bytes:
        raise ValueError(f"above its limit of {max_bytes} bytes")
    return all_reduce


class _SymmetricMemory:
    """torch's own kernels over symmetric memory, without multicast."""

    def __init__(self, worker: Worker, group: TensorParallelGroup) -> None:
        self._worker = worker
        self._name = "all-reduce-timing"
        self._problem = ""
        self._tensors: dict[int, torch.Tensor] = {}
        if worker.rendezvous is None:
            self._problem = "there is no file to meet in"
            return
        store = dist.PrefixStore("symmetric-memory", dist.FileStore(worker.rendezvous, group.size))
        # The kernels look the group up by its name, and want no more of it than its store, rank and size.
        self._group = dist.ProcessGroup(store, group.rank, group.size)
        _register_process_group(self._name, self._group)
        self._memory().set_group_info(self._name, group.rank, group.size, store)

    def one_shot(self, num_elements: int) -> AllReduce:
        shared = self._shared(num_elements)

        def run(x: torch.Tensor) -> torch.Tensor:
            shared.copy_(x)
            return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self._name)

        return run

    def two_shot(self, num_elements: int) -> AllReduce:
        shared = self._shared(num_elements)

        def run(x: torch.Tensor) -> torch.Tensor:
            shared.copy_(x)
            return torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._name)

        return run

    def _shared(self, num_elements: int) -> torch.Tensor:
        if self._problem:
            raise ValueError(self._problem)
        if num_elements not in self._tensors:
            tensor = self._memory().empty_strided_p2p(
                (num_elements,), (1,), self._worker.dtype, self._worker.device, self._name
            )
            self._memory().rendezvous(tensor)
            self._tensors[num_elements] = tensor
        return self._tensors[num_elements]

    def _memory(self) -> Any:
        from torch._C import _distributed_c10d

        return _distributed_c10d._SymmetricMemory


def _time(worker: Worker, way: str, num_bytes: int, all_reduce: AllReduce) -> AllReduceTiming:
    size, rank = worker.group.size, worker.group.rank
    num_elements = num_bytes // worker.dtype.itemsize
    options = {"dtype": worker.dtype, "device": worker.device}
    whole = torch.arange(num_elements, **options).remainder_(8)
    summed = all_reduce((whole + rank).clone())
    is_exact = bool(torch.equal(summed, whole * size + size * (size - 1) // 2))
    generator = torch.Generator().manual_seed(rank)
    noise = torch.randn(num_elements, generator=generator).to(worker.dtype).to(worker.device)
    bits = hashlib.sha256(all_reduce(noise.clone()).cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
    # Zeros: a sum that is made in place many times over must stay finite.
    us = _median_us(all_reduce, torch.zeros(num_elements, **options))
    return AllReduceTiming(way=way, num_bytes=num_bytes, us=us, is_exact=is_exact, bits=bits[:16])


def _median_us(all_reduce: AllReduce, x: torch.Tensor) -> float:
    if x.device.type != "cuda":
        samples = []
        for _ in range(NUM_WARM_UP + NUM_TIMED):
            began_at = time.perf_counter()
            for _ in range(NUM_IN_GRAPH):
                all_reduce(x)
            samples.append((time.perf_counter() - began_at) / NUM_IN_GRAPH)
        return 1e6 * statistics.median(samples[NUM_WARM_UP:])
    stream = torch.cuda.Stream(x.device)
    # Never two sums at once: the ranks could begin them in different orders.
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        all_reduce(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(NUM_IN_GRAPH):
                all_reduce(x)
        samples = []
        for _ in range(NUM_WARM_UP + NUM_TIMED):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) / 1e3 / NUM_IN_GRAPH)
    torch.cuda.current_stream(x.device).wait_stream(stream)
    return 1e6 * statistics.median(samples[NUM_WARM_UP:])
