"""Collectives over gloo: uneven parts, several dtypes, the same bits on every rank."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from phalanx.shm.errors import ConfigError
from phalanx.workers.tp_group import TensorParallelGroup, connect_group
from support.children import listening_addresses

CPU = torch.device("cpu")


def on_ranks(size: int, act: Callable[[TensorParallelGroup], torch.Tensor]) -> list[torch.Tensor]:
    """Run `act` on every rank of a group, each in a thread of its own."""
    file = os.memfd_create("rendezvous")

    def run(rank: int) -> torch.Tensor:
        group = connect_group(
            rank=rank, size=size, rendezvous=f"/proc/self/fd/{file}", device=CPU, share_device=False
        )
        result = act(group)
        group.barrier()
        group.close()
        group.close()
        return result

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, range(size)))
    os.close(file)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_have_the_same_bits_on_every_rank(dtype: torch.dtype) -> None:
    def act(group: TensorParallelGroup) -> torch.Tensor:
        generator = torch.Generator().manual_seed(group.rank)
        return group.all_reduce(torch.randn(37, 11, generator=generator).to(dtype))

    first, *others = on_ranks(3, act)

    exact = sum(torch.randn(37, 11, generator=torch.Generator().manual_seed(rank)) for rank in range(3))
    torch.testing.assert_close(first.float(), exact, atol=0.05, rtol=0.02)
    assert all(torch.equal(first, other) for other in others)


def test_uneven_parts_are_put_side_by_side() -> None:
    sizes = (3, 0, 2)

    def act(group: TensorParallelGroup) -> torch.Tensor:
        own = torch.arange(4.0).unsqueeze(-1) * 10 + group.rank
        return group.all_gather_last_dim(own.repeat(1, sizes[group.rank]), sizes)

    results = on_ranks(3, act)

    expected = torch.arange(4.0).unsqueeze(-1) * 10 + torch.tensor([0.0, 0, 0, 2, 2])
    assert all(torch.equal(result, expected) for result in results)


def test_a_broadcast_gives_everyone_the_sources_values() -> None:
    results = on_ranks(2, lambda group: group.broadcast(torch.full((3,), group.rank), 1))

    assert all(result.tolist() == [1, 1, 1] for result in results)


def test_ranks_listen_on_the_loopback_interface_alone() -> None:
    before = listening_addresses([os.getpid()])
    during: list[set[tuple[str, str]]] = []

    def act(group: TensorParallelGroup) -> torch.Tensor:
        group.barrier()
        during.append(listening_addresses([os.getpid()]) - before)
        return group.all_reduce(torch.ones(1))

    on_ranks(2, act)

    for found in during:
        assert found, "gloo's ranks find each other through sockets"
        assert {address.partition(":")[0] for _, address in found} == {"0100007F"}


def test_several_ranks_need_a_rendezvous() -> None:
    with pytest.raises(ConfigError, match="rendezvous"):
        connect_group(rank=0, size=2, rendezvous=None, device=CPU, share_device=False)
