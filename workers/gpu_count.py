"""How many GPUs this host has, by their device files: known without torch, in microseconds.

Called by: whoever plans before a worker starts; in a worker torch knows better.
"""

import os
import re
from pathlib import Path


def count_gpus(devices: Path = Path("/dev")) -> int:
    """Count the NVIDIA GPUs that a worker would see: device files, or fewer by CUDA_VISIBLE_DEVICES."""
    present = sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
