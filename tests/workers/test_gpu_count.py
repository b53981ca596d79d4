"""How many GPUs a worker will see, with device files of our own."""

from pathlib import Path

import pytest

from phalanx.workers.gpu_count import count_gpus


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("3,0", 2),
        (" 1 , 2 ", 2),
        ("0,-1,1", 1),
        ("0,4,1", 1),
        ("9", 0),
        ("GPU-8932f937,GPU-11111111", 2),
        ("MIG-c7384736", 1),
        ("0,1,2,3,0", 4),
    ],
)
def test_it_counts_what_cuda_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert count_gpus(tmp_path) == expected
