"""CPU ranks in processes exchange through shared memory unless told otherwise."""

from pathlib import Path

from phalanx.workers.config import CacheConfig, DeviceType, ExecutorConfig, ModelConfig, ParallelConfig
from phalanx.workers.executor import create_executor
from phalanx.workers.multiproc_executor import MultiprocExecutor
from support.children import is_gone, wait_until
from support.tiny_models import write_tiny_llama


def test_ranks_on_cpu_exchange_through_shared_memory(tmp_path: Path) -> None:
    executor = create_executor(
        model=ModelConfig(path=str(write_tiny_llama(tmp_path)), max_model_len=100),
        cache=CacheConfig(num_blocks=20),
        parallel=ParallelConfig(tensor_parallel_size=2, device=DeviceType.CPU, num_threads=1),
        executor=ExecutorConfig(),
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    assert isinstance(executor, MultiprocExecutor)
    report = executor.start()
    pids = executor.pids
    executor.close(reason="test")

    assert [rank.collectives for rank in report.ranks] == ["shm", "shm"]
    wait_until(lambda: all(is_gone(pid) for pid in pids), timeout_s=10)
