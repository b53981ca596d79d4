"""An engine core with a model in the test's own process.

Called by: tests of the engine that need real tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.engine.config import EngineConfig, SchedulerConfig
from phalanx.engine.core import EngineCore
from phalanx.engine.messages import EngineCoreOutput, EngineCoreRequest
from phalanx.workers.config import CacheConfig, DeviceType, ModelConfig, ParallelConfig
from phalanx.workers.uniproc_executor import UniprocExecutor
from phalanx.workers.worker_config import WorkerConfig

from .step_outputs import write_out


@contextmanager
def open_core(
    folder: Path,
    *,
    num_blocks: int,
    block_size: int = 4,
    max_num_batched_tokens: int = 32,
    max_steps_in_flight: int = 2,
) -> Iterator[EngineCore]:
    """Open an engine core whose worker's rows are compared with the scheduler's books in each step."""
    model = ModelConfig(path=str(folder))
    parallel = ParallelConfig(num_threads=1, device=DeviceType.CPU)
    cache = CacheConfig(block_size=block_size, num_blocks=num_blocks)
    scheduler = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
        max_steps_in_flight=max_steps_in_flight,
        check_worker_rows=True,
    )
    executor = UniprocExecutor(
        WorkerConfig(
            model=model,
            cache=cache,
            parallel=parallel,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            tp_rank=0,
            device_index=0,
            rendezvous=None,
        )
    )
    config = EngineConfig(model=model, cache=cache, parallel=parallel, scheduler=scheduler)
    core = EngineCore(config, executor, executor.start())
    try:
        yield core
    finally:
        core.close(reason="test")


def run_core(core: EngineCore, *requests: EngineCoreRequest) -> tuple[list[EngineCoreOutput], int]:
    """Run requests to their end. Returns their outputs, and the most blocks that were in use at once."""
    for request in requests:
        core.add_request(request)
    outputs: list[EngineCoreOutput] = []
    most_blocks = 0
    while core.has_work:
        for made in core.step().values():
            outputs += write_out(made)
        stats = core.stats()
        most_blocks = max(most_blocks, stats.num_blocks - stats.num_free_blocks)
    assert not [output.error for output in outputs if output.error]
    return outputs, most_blocks
