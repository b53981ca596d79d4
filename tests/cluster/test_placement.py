"""The plan of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.placement import Plan, make_plan
from phalanx.shm.errors import ConfigError
from phalanx.workers.config import DeviceType


def plan(tp: int, dp: int, **changes: object) -> Plan:
    settings: dict[str, object] = {"device": DeviceType.CUDA, "num_devices": 8, "num_cores": 16, **changes}
    return make_plan(data_parallel_size=dp, tensor_parallel_size=tp, **settings)  # type: ignore[arg-type]


@given(st.integers(1, 8), st.integers(1, 8))
def test_every_rank_has_a_gpu_of_its_own(tp: int, dp: int) -> None:
    ranks = plan(tp, dp, num_devices=tp * dp).ranks

    assert [(rank.dp_rank, rank.tp_rank) for rank in ranks] == [(d, t) for d in range(dp) for t in range(tp)]
    assert [rank.device for rank in ranks] == [f"cuda:{i}" for i in range(tp * dp)]


def test_more_ranks_than_gpus_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="4 ranks × 3 replicas need 12 GPUs, and this host has 8"):
        plan(4, 3)


def test_cuda_without_a_gpu_is_refused_even_when_ranks_share() -> None:
    with pytest.raises(ConfigError, match="this host has 0"):
        plan(1, 1, num_devices=0, share_device=True)


def test_ranks_share_the_first_gpu_when_told_to() -> None:
    assert {rank.device for rank in plan(2, 2, num_devices=1, share_device=True).ranks} == {"cuda:0"}


def test_cpu_ranks_share_the_cores_and_each_has_at_least_one() -> None:
    assert {rank.num_threads for rank in plan(2, 2, device=DeviceType.CPU, num_cores=16).ranks} == {4}
    assert {rank.num_threads for rank in plan(4, 2, device=DeviceType.CPU, num_cores=2).ranks} == {1}
    assert {r.num_threads for r in plan(1, 1, device=DeviceType.CPU, num_cores=4, num_threads=3).ranks} == {3}


def test_the_digest_tells_plans_apart() -> None:
    assert plan(2, 1).digest == plan(2, 1).digest
    assert len({plan(2, 1).digest, plan(1, 2).digest, plan(2, 1, device=DeviceType.CPU).digest}) == 3


def test_a_replica_is_its_ranks_in_order() -> None:
    assert [(r.dp_rank, r.tp_rank) for r in plan(2, 3).replica(1)] == [(1, 0), (1, 1)]
    assert plan(2, 3).replica(1)[0].role == "dp1 tp0"
