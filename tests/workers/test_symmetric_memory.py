"""Symmetric memory where there is none: an error, and nothing stays registered. The sums are tested on GPUs."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from phalanx.workers import symmetric_memory
from phalanx.workers.symmetric_memory import SymmetricMemory, SymmetricMemoryError


def test_without_a_gpu_it_says_so_and_lets_go_of_its_name(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    number = next(symmetric_memory._numbers) + 1

    with pytest.raises(SymmetricMemoryError, match="cpu"):
        SymmetricMemory(store, rank=0, size=2, device=torch.device("cpu"), max_bytes=1 << 20)

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
