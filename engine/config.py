"""The sections of one replica's engine core."""

from dataclasses import dataclass, field

from ..shm.errors import ConfigError
from ..workers.config import CacheConfig, ExecutorConfig, ModelConfig, ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much work one step may hold."""

    max_num_seqs: int = 256
    """Requests in one step, running and newly admitted together."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step, prefill and decode together. A longer prompt is computed in chunks."""
    max_num_waiting: int = 4096
    """Requests that may wait in one replica. One more is answered 429."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError("scheduler.max_num_seqs", f"must be at least 1, not {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "scheduler.max_num_batched_tokens",
                f"must be at least scheduler.max_num_seqs ({self.max_num_seqs}), not {self.max_num_batched_tokens}",
            )
        if self.max_num_waiting < 1:
            raise ConfigError("scheduler.max_num_waiting", f"must be at least 1, not {self.max_num_waiting}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that one replica needs: its own section and those of the workers below it."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
