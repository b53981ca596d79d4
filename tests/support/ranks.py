"""A whole replica in this process: its ranks as threads, driven without an engine.

Called by: tests of the model side.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.workers.config import DeviceType, ParallelConfig
from support.model_steps import RankThreads, StepDriver, make_worker


@contextmanager
def open_ranks(folder: Path, tp_size: int, **settings: Any) -> Iterator[StepDriver]:
    """Drive a replica of `tp_size` CPU ranks. settings: of `make_worker`"""
    file = os.memfd_create("rendezvous")
    parallel = ParallelConfig(tensor_parallel_size=tp_size, device=DeviceType.CPU, num_threads=1)
    ranks = RankThreads(
        [
            make_worker(
                folder, parallel=parallel, tp_rank=rank, rendezvous=f"/proc/self/fd/{file}", **settings
            )
            for rank in range(tp_size)
        ]
    )
    try:
        yield StepDriver(ranks.start(), num_kv_groups=ranks.num_kv_groups)
    finally:
        ranks.close()
        os.close(file)
