"""Ranks that map each other's memory: all of them, or none. The driver here is one that only counts."""

import threading
from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from phalanx.workers import peer_memory
from phalanx.workers.peer_memory import PeerAccessError, PeerMemory

SIZE = 3


class CountingDriver:
    """Memory of rank r is at 1000 + r; opening it gives 2000 + r. Refuses what `refused` names, as "open 1"."""

    refused: Sequence[str] = ()
    closed: ClassVar[list[int]] = []

    def allocate(self, num_bytes: int) -> int:
        rank = int(threading.current_thread().name)
        self._ask(f"allocate {rank}")
        return 1000 + rank

    def clear(self, address: int, num_bytes: int) -> None:
        pass

    def has_atomics(self, index: int, peer_index: int) -> bool:
        return "atomics" not in self.refused

    def export(self, address: int) -> bytes:
        return address.to_bytes(64, "little")

    def open(self, handle: bytes) -> int:
        address = int.from_bytes(handle, "little")
        self._ask(f"open {address - 1000}")
        return address + 1000

    def close(self, address: int) -> None:
        CountingDriver.closed.append(address)

    def _ask(self, what: str) -> None:
        if what in self.refused:
            raise PeerAccessError(f"{what}: not supported")


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_Driver", CountingDriver)
    monkeypatch.setattr(CountingDriver, "refused", ())
    monkeypatch.setattr(CountingDriver, "closed", [])


def meet() -> list[PeerMemory | PeerAccessError]:
    """Have all ranks meet, each in a thread; return what each got."""
    store = dist.HashStore()
    results: list[PeerMemory | PeerAccessError] = [PeerAccessError("never ended")] * SIZE

    def run(rank: int) -> None:
        try:
            results[rank] = PeerMemory(store, rank=rank, size=SIZE, num_bytes=64, device=torch.device("cpu"))
        except PeerAccessError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_every_rank_maps_all_parts_in_the_order_of_the_ranks() -> None:
    for rank, memory in enumerate(meet()):
        assert isinstance(memory, PeerMemory)
        expected = [2000, 2001, 2002]
        expected[rank] = 1000 + rank
        assert memory.addresses == expected
        memory.close()
        memory.close()
    assert sorted(CountingDriver.closed) == [2000, 2000, 2001, 2001, 2002, 2002]


@pytest.mark.parametrize("what", ["allocate 1", "open 2"])
def test_what_one_rank_is_refused_all_hear_and_nothing_stays_mapped(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CountingDriver, "refused", (what,))

    results = meet()

    assert all(
        isinstance(result, PeerAccessError) and f"{what}: not supported" in str(result) for result in results
    )
    # Each of the others opens one part before it comes to that of rank 2, which itself opens both others'.
    assert sorted(CountingDriver.closed) == ([] if what == "allocate 1" else [2000, 2000, 2001, 2001])


def test_gpus_without_atomic_operations_on_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingDriver, "refused", ("atomics",))

    assert all("no atomic operations" in str(result) for result in meet())
    assert CountingDriver.closed == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(PeerAccessError, match="no CUDA driver"):
        PeerMemory(dist.HashStore(), rank=0, size=1, num_bytes=64, device=torch.device("cpu"))
