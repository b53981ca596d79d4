"""The hook "time_all_reduce": what a sum over the ranks costs, by length and by the way it takes.

Called by: hooks.py in every rank's process at the same time, for `cluster-bench multi-gpu` (executor.hooks names it).
On a GPU the time is that of a CUDA graph of many sums, so that no launch is in it.

When a peer dies: as its group (tp_group.py).
"""

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator

import msgspec
import torch
import torch.distributed as dist

from .nccl_group import NcclGroup
from .process_group import connect_gloo
from .symmetric_memory import SymmetricMemory
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
    ways = _own_ways(worker) if argument.is_own else _other_ways(worker, max(argument.sizes))
    timings = []
    with torch.inference_mode():
        for way, make in ways:
            for num_bytes in argument.sizes:
                try:
                    timings.append(_time(worker, way, num_bytes, make(num_bytes)))
                # A way that this torch or driver does not have fails in its own way, on all ranks.
                except (RuntimeError, ValueError, AttributeError) as error:
                    problem = str(error).partition("\n")[0] or type(error).__name__
                    timings.append(AllReduceTiming(way=way, num_bytes=num_bytes, problem=problem))
    return timings


def _own_ways(worker: Worker) -> Iterator[tuple[str, Callable[[int], AllReduce]]]:
    """Name the ways; each gives, for a number of bytes, the function that sums."""
    group = worker.group
    yield f"as served ({group.name})", lambda _: group.all_reduce
    if isinstance(group, NcclGroup):
        yield "nccl", lambda _: group.all_reduce_by_nccl
        if group.one_shot is not None:
            one_shot = group.one_shot
            yield "one-shot", lambda num_bytes: _within(one_shot.max_bytes, num_bytes, one_shot.all_reduce)
        if group.symmetric is not None:
            symmetric = group.symmetric
            yield "two-shot", lambda num_bytes: _within(symmetric.max_bytes, num_bytes, symmetric.two_shot)


def _other_ways(worker: Worker, max_bytes: int) -> Iterator[tuple[str, Callable[[int], AllReduce]]]:
    group = worker.group
    if isinstance(group, NcclGroup) and worker.rendezvous is not None:
        store = dist.PrefixStore("all-reduce-timing", dist.FileStore(worker.rendezvous, group.size))
        symmetric = SymmetricMemory(
            store, rank=group.rank, size=group.size, device=worker.device, max_bytes=max_bytes
        )
        yield "torch's one-shot", lambda _: symmetric.one_shot
        yield "torch's two-shot", lambda _: symmetric.two_shot
        symmetric.close()
    elif worker.rendezvous is not None and group.size > 1 and worker.device.type == "cpu":
        store = dist.PrefixStore("all-reduce-timing", dist.FileStore(worker.rendezvous, group.size))
        gloo = connect_gloo(store, rank=group.rank, size=group.size)
        yield "gloo", lambda _: gloo.all_reduce
        gloo.close()


def _within(max_bytes: int, num_bytes: int, all_reduce: AllReduce) -> AllReduce:
    if num_bytes > max_bytes:
        raise ValueError(f"above its limit of {max_bytes} bytes")
    return all_reduce


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
