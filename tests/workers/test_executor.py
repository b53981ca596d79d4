"""Which executor is built, and from what."""

import pytest

from phalanx.shm.errors import ConfigError, QueueClosedError
from phalanx.workers.config import CacheConfig, ExecutorConfig, ModelConfig, ParallelConfig
from phalanx.workers.executor import Executor, create_executor, make_worker_configs
from phalanx.workers.multiproc_executor import MultiprocExecutor


def create(num_ranks: int, *, in_process: bool = False) -> Executor:
    return create_executor(
        model=ModelConfig(path="/nowhere"),
        cache=CacheConfig(),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks),
        executor=ExecutorConfig(),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        in_process=in_process,
    )


def test_ranks_are_on_consecutive_devices() -> None:
    configs = make_worker_configs(
        model=ModelConfig(path="/nowhere"),
        cache=CacheConfig(),
        parallel=ParallelConfig(tensor_parallel_size=3),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        first_device_index=4,
    )

    assert [(config.tp_rank, config.device_index) for config in configs] == [(0, 4), (1, 5), (2, 6)]


def test_processes_are_the_default_also_for_one_rank() -> None:
    assert isinstance(create(1), MultiprocExecutor)


def test_more_ranks_than_a_ring_has_readers_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 to 16, not 17"):
        create(17)


def test_a_model_that_is_not_there_is_refused_before_anything_starts() -> None:
    executor = create(2)
    with pytest.raises(ConfigError, match="neither a folder nor a GGUF file"):
        executor.start()

    assert executor.phases == []


def test_an_executor_that_was_never_started_can_be_closed_and_not_used() -> None:
    executor = create(1)
    executor.close(reason="changed my mind")

    with pytest.raises(QueueClosedError, match="changed my mind"):
        executor.start()
