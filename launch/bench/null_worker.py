"""A worker without a model: answers each step at once. What remains of a step's time is the executor's.

Called by: workers/worker_proc.py, by name, in processes that the executor benchmark starts. Imports no torch.
"""

import os
from collections.abc import Callable

from ...workers.memory_report import ModelMemory
from ...workers.messages import GrammarMasks, RankReport, SchedulerOutput
from ...workers.step_in_flight import FinishedStep
from ...workers.worker_config import WorkerConfig
from .decode_load import sample_all

NULL_WORKER = "phalanx.launch.bench.null_worker:NullWorker"


class NullWorker:
    """See worker_proc.WorkerLike. Samples the same token for every request."""

    def __init__(self, config: WorkerConfig, on_phase: Callable[[str], None]) -> None:
        self._config = config

    @property
    def tp_rank(self) -> int:
        """Which rank it is."""
        return self._config.tp_rank

    def start(self) -> RankReport:
        """Report a rank that holds nothing."""
        return RankReport(
            tp_rank=self._config.tp_rank,
            pid=os.getpid(),
            device="none",
            device_name="",
            dtype="none",
            attention_backend="none",
            weight_bytes=0,
            kv_bytes_per_block=1,
            num_kv_blocks=2,
            num_threads=1,
            phases=[],
        )

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """There is none."""

    def begin_step(
        self, scheduler_output: SchedulerOutput, receive_masks: Callable[[], GrammarMasks]
    ) -> FinishedStep:
        """Answer at once."""
        return FinishedStep(sample_all(scheduler_output))

    def model_memory(self) -> ModelMemory:
        """Say that nothing is held."""
        return ModelMemory(weight_bytes=0, kv_cache_bytes=0, device=None)

    def close(self) -> None:
        """There is nothing to free."""
