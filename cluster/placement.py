"""The plan: which rank computes on which device. Made once, before anything starts; pure.

Called by: launch/runtime.py, which shows it (`--dry-run`) and hands it to the supervisor. A frozen table, so
that no process derives its device by arithmetic of its own.
"""

import hashlib
from dataclasses import dataclass

import msgspec

from ..shm.errors import ConfigError
from ..workers.config import DeviceType


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRank:
    """One worker: dp_rank and tp_rank, host, device ("cpu", "cuda:3") and compute threads."""

    dp_rank: int
    tp_rank: int
    host: str
    device: str
    device_index: int
    num_threads: int

    @property
    def role(self) -> str:
        """Its name in logs, tables and process titles."""
        return f"dp{self.dp_rank} tp{self.tp_rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All workers of a cluster, ordered by dp_rank and tp_rank."""

    data_parallel_size: int
    tensor_parallel_size: int
    ranks: tuple[PlannedRank, ...]

    def replica(self, dp_rank: int) -> tuple[PlannedRank, ...]:
        """The ranks of one replica, by tp_rank."""
        return tuple(rank for rank in self.ranks if rank.dp_rank == dp_rank)

    @property
    def digest(self) -> str:
        """Short hash of the table: equal on two hosts exactly when they follow the same plan."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]


def make_plan(
    *,
    data_parallel_size: int,
    tensor_parallel_size: int,
    device: DeviceType,
    num_devices: int,
    num_cores: int,
    num_threads: int | None = None,
    share_device: bool = False,
    host: str = "localhost",
) -> Plan:
    """Give every rank its device.

    num_devices:  GPUs of this host; ignored on CPU
    num_cores:    cores that this program may use; CPU ranks share them evenly unless num_threads says otherwise
    share_device: for tests: all ranks on GPU 0

    Raises ConfigError when there are more ranks than GPUs.
    """
    assert device is not DeviceType.AUTO, "the device is chosen before the plan is made"
    num_ranks = data_parallel_size * tensor_parallel_size
    if device is DeviceType.CUDA and (num_devices == 0 or (num_ranks > num_devices and not share_device)):
        raise ConfigError(
            "parallel.tensor_parallel_size",
            f"{tensor_parallel_size} ranks × {data_parallel_size} replicas need {num_ranks} GPUs, "
            f"and this host has {num_devices}",
        )
    threads = num_threads or max(1, num_cores // num_ranks)
    ranks = []
    for index in range(num_ranks):
        device_index = 0 if share_device or device is DeviceType.CPU else index
        ranks.append(
            PlannedRank(
                dp_rank=index // tensor_parallel_size,
                tp_rank=index % tensor_parallel_size,
                host=host,
                device="cpu" if device is DeviceType.CPU else f"cuda:{device_index}",
                device_index=device_index,
                num_threads=threads,
            )
        )
    return Plan(
        data_parallel_size=data_parallel_size, tensor_parallel_size=tensor_parallel_size, ranks=tuple(ranks)
    )
