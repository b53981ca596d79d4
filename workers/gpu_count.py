"""How many GPUs this host has, by their device files: known without torch, in microseconds.

Called by: whoever plans before a worker starts; in a worker torch knows better.
"""

import itertools
import os
import re
from pathlib import Path


def count_gpus(devices: Path = Path("/dev")) -> int:
    """Count the NVIDIA GPUs that a worker would see: device files, or fewer by CUDA_VISIBLE_DEVICES.

    Of that list CUDA takes what stands before the first number that is no GPU's. It may also hold UUIDs.
    """
    present = sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    names = [name.strip() for name in visible.split(",")]
    taken = itertools.takewhile(lambda name: _may_exist(name, present), names)
    return min(present, len(list(taken)))


def _may_exist(name: str, num_present: int) -> bool:
    if re.fullmatch(r"[+-]?\d+", name):
        return 0 <= int(name) < num_present
    return name != ""
