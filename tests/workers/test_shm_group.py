"""Collectives through shared memory: as exact as plain sums, the same bits on every rank, whatever the timing."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.shm import collective_arena
from phalanx.shm.collective_arena import create_arena
from phalanx.shm.process import ChildSpec, Spawner, wait_all_ready
from phalanx.workers import shm_group
from phalanx.workers.shm_group import ShmGroup, connect_shm
from phalanx.workers.tp_group import connect_group
from support.arena_peers import RankArgs

SLOT_BYTES = 4096
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]
Act = Callable[[ShmGroup], torch.Tensor]


def on_ranks(size: int, act: Act, *, slot_bytes: int = SLOT_BYTES) -> list[torch.Tensor]:
    """Run `act` on every rank of a group, each in a thread of its own."""
    segment = create_arena("test", num_ranks=size, slot_bytes=slot_bytes)

    def run(rank: int) -> torch.Tensor:
        group = connect_shm(os.dup(segment.fd), rank=rank, timeout_s=30)
        try:
            return act(group)
        finally:
            group.close()
            group.close()

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(run, range(size)))
    finally:
        segment.close()


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def summed_in_order(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    total = values(0, shape, dtype).to(wide)
    for rank in range(1, size):
        total = total + values(rank, shape, dtype).to(wide)
    return total.to(dtype)


def assert_all_equal(results: list[torch.Tensor], expected: torch.Tensor) -> None:
    for result in results:
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("shape", [(1,), (7, 37), (5, 3000), (0, 8)])
@pytest.mark.parametrize("summed_by_all_bytes", [0, 1 << 30])
def test_a_sum_is_that_of_the_ranks_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    size: int,
    shape: tuple[int, ...],
    summed_by_all_bytes: int,
) -> None:
    monkeypatch.setattr(shm_group, "MAX_SUMMED_BY_ALL_BYTES", summed_by_all_bytes)

    results = on_ranks(size, lambda group: group.all_reduce(values(group.rank, shape, dtype)))

    assert_all_equal(results, summed_in_order(size, shape, dtype))


@pytest.mark.parametrize("num_bytes", [4, 4096, 1 << 20, pytest.param((4 << 20) + 4, marks=pytest.mark.full)])
@pytest.mark.parametrize("size", [2, 4])
def test_messages_of_any_length_are_summed(size: int, num_bytes: int) -> None:
    shape = (num_bytes // 4,)
    results = on_ranks(
        size,
        lambda group: group.all_reduce(values(group.rank, shape, torch.float32)),
        slot_bytes=collective_arena.SLOT_BYTES,
    )

    assert_all_equal(results, summed_in_order(size, shape, torch.float32))


@pytest.mark.parametrize("sizes", [(3, 0, 2), (1, 1, 1), (0, 0, 700), (1500, 1023, 1025)])
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_uneven_parts_are_put_side_by_side(sizes: tuple[int, ...], rows: int) -> None:
    parts = [values(rank, (rows, size), torch.float32) for rank, size in enumerate(sizes)]

    results = on_ranks(3, lambda group: group.all_gather_last_dim(parts[group.rank], sizes))

    assert_all_equal(results, torch.cat(parts, dim=-1))


@pytest.mark.parametrize("sizes", [(3, 0, 2), (1, 1, 1), (50, 9, 41)])
def test_each_rank_keeps_its_rows_of_the_sum(sizes: tuple[int, ...]) -> None:
    shape = (sum(sizes), 100)

    results = on_ranks(
        3, lambda group: group.reduce_scatter(values(group.rank, shape, torch.bfloat16), sizes)
    )

    expected = summed_in_order(3, shape, torch.bfloat16).split(list(sizes))
    assert all(torch.equal(result, rows) for result, rows in zip(results, expected, strict=True))


@pytest.mark.parametrize("source", [0, 2])
@pytest.mark.parametrize("length", [3, 5000])
def test_a_broadcast_gives_everyone_the_sources_values(source: int, length: int) -> None:
    def act(group: ShmGroup) -> torch.Tensor:
        return group.broadcast(torch.arange(length) + group.rank * 1000, source)

    assert_all_equal(on_ranks(3, act), torch.arange(length) + source * 1000)


def test_sums_agree_with_gloo() -> None:
    def over_gloo(group: ShmGroup) -> torch.Tensor:
        path = f"/proc/self/fd/{file}"
        gloo = connect_group(
            rank=group.rank, size=3, rendezvous=path, device=torch.device("cpu"), share_device=False
        )
        assert (gloo.name, group.name) == ("gloo", "shm")
        x = values(group.rank, (19, 77), torch.float32)
        ours, theirs = group.all_reduce(x.clone()), gloo.all_reduce(x.clone())
        part = group.reduce_scatter(x, (10, 5, 4))
        torch.testing.assert_close(part, gloo.reduce_scatter(x, (10, 5, 4)))
        gloo.barrier()
        gloo.close()
        torch.testing.assert_close(ours, theirs)
        return ours

    file = os.memfd_create("rendezvous")
    first, *others = on_ranks(3, over_gloo)
    os.close(file)

    assert_all_equal(others, first)


@settings(deadline=None, max_examples=15)
@given(
    size=st.integers(2, 4),
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    stalls=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 11), st.floats(0, 0.004)), max_size=6),
)
def test_results_do_not_depend_on_timing(
    size: int, lengths: list[int], stalls: list[tuple[int, int, float]]
) -> None:
    """Ranks stall at random, between collectives of all kinds, which follow each other at once otherwise."""
    delays = {(rank, number): seconds for rank, number, seconds in stalls}
    nobody = threading.Event()

    def act(group: ShmGroup) -> torch.Tensor:
        results = []
        for number, length in enumerate(lengths):
            nobody.wait(delays.get((group.rank, number), 0.0))
            x = values(group.rank + number, (length,), torch.float32)
            if number % 3 == 0:
                results.append(group.all_reduce(x))
            elif number % 3 == 1:
                results.append(group.all_gather_last_dim(x.unsqueeze(0), [length] * size).squeeze(0))
            else:
                results.append(group.broadcast(x, number % size))
        return torch.cat(results)

    expected = []
    for number, length in enumerate(lengths):
        parts = [values(rank + number, (length,), torch.float32) for rank in range(size)]
        if number % 3 == 0:
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            expected.append(total)
        else:
            expected.append(torch.cat(parts) if number % 3 == 1 else parts[number % size])
    assert_all_equal(on_ranks(size, act), torch.cat(expected))


def test_ranks_in_processes_get_the_same_bits() -> None:
    """More ranks than most test machines have free cores."""
    size = 4
    segment = create_arena("test", num_ranks=size, slot_bytes=64 << 10)
    spawner = Spawner("test")
    spawner.start()
    children = []
    for rank in range(size):
        args = RankArgs(fd=segment.fd, size=segment.size, rank=rank, num_exchanges=200)
        children.append(
            spawner.spawn(
                ChildSpec(
                    role=f"rank {rank}",
                    target="support.arena_peers:sum_in_a_process",
                    args=msgspec.msgpack.encode(args),
                    pass_fds=(segment.fd,),
                    env={"OMP_NUM_THREADS": "1"},
                )
            )
        )
    segment.close()
    try:
        digests = wait_all_ready(children, time.monotonic() + 60)
    finally:
        for child in children:
            child.kill()
            child.stop(reason="test", timeout_s=5)
        spawner.close()

    assert len(set(digests)) == 1
