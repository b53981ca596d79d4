"""Symmetric memory where there is none: an error, and nothing stays registered. The sums are tested on GPUs."""

import itertools
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from phalanx.workers import symmetric_memory
from phalanx.workers.symmetric_memory import SymmetricMemory, SymmetricMemoryError


class RefusingMemory:
    """Allocates and maps nothing; refuses what `refused` names, to one rank: "allocate 1"."""

    refused = ""

    @classmethod
    def set_group_info(cls, name: str, rank: int, size: int, store: dist.Store) -> None:
        pass

    @classmethod
    def empty_strided_p2p(cls, *arguments: object) -> torch.Tensor:
        cls._ask("allocate")
        return torch.zeros(8)

    @classmethod
    def rendezvous(cls, buffer: torch.Tensor) -> None:
        cls._ask("map")

    @classmethod
    def _ask(cls, what: str) -> None:
        if cls.refused == f"{what} {threading.current_thread().name}":
            raise RuntimeError(f"cannot {what}\nsomewhere in torch")


class Registry:
    """Stands for torch's bindings: which groups are registered, and a memory that refuses."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._SymmetricMemory = RefusingMemory

    def _register_process_group(self, name: str, group: dist.ProcessGroup) -> None:
        self.names.append(name)

    def _unregister_process_group(self, name: str) -> None:
        self.names.remove(name)


@pytest.mark.parametrize(
    ("refused", "problem"), [("allocate 1", "rank 1: cannot allocate"), ("map 2", "rank 2: cannot map")]
)
def test_what_one_rank_has_not_none_has(monkeypatch: pytest.MonkeyPatch, refused: str, problem: str) -> None:
    """A rank that sums in its own way would wait for its peers for ever."""
    registry = Registry()
    monkeypatch.setattr(symmetric_memory, "c10d", registry)
    # Ranks count for themselves; here they are threads.
    monkeypatch.setattr(symmetric_memory, "_numbers", itertools.repeat(7))
    monkeypatch.setattr(RefusingMemory, "refused", refused)
    store = dist.HashStore()
    problems: dict[int, str] = {}

    def run(rank: int) -> None:
        try:
            SymmetricMemory(store, rank=rank, size=3, device=torch.device("cpu"), max_bytes=64)
        except SymmetricMemoryError as error:
            problems[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert problems == dict.fromkeys(range(3), problem)
    assert registry.names == []


def test_without_a_gpu_it_says_so_and_lets_go_of_its_name(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    number = next(symmetric_memory._numbers) + 1

    with pytest.raises(SymmetricMemoryError, match="cpu"):
        SymmetricMemory(store, rank=0, size=1, device=torch.device("cpu"), max_bytes=1 << 20)

    with pytest.raises(RuntimeError, match="Could not resolve"):
        c10d._resolve_process_group(f"phalanx-symmetric-memory-{number}")


@pytest.mark.parametrize(
    ("dtype", "num_elements", "expected"),
    [
        (torch.bfloat16, 512, True),
        (torch.float32, 256, True),
        (torch.float16, 512, False),
        (torch.bfloat16, 520, False),
        (torch.bfloat16, 528, False),
        (torch.float32, 8, True),
        (torch.float32, 4, False),
    ],
)
def test_a_tensor_is_taken_in_whole_shares_up_to_the_limit(
    dtype: torch.dtype, num_elements: int, expected: bool
) -> None:
    memory = SymmetricMemory.__new__(SymmetricMemory)
    memory.max_bytes, memory._size = 1024, 2

    assert memory.can_sum(torch.zeros(num_elements, dtype=dtype)) is expected
