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
    """Tokens computed in one step, prefill and decode together. A longer prompt is computed in chunks. On a GPU the
    default is 16640 (device_defaults.py)."""
    max_num_waiting: int = 4096
    """Requests that may wait in one replica. One more is answered 429."""
    max_steps_in_flight: int = 2
    """Steps submitted to the workers and not back yet. 2: the next step is planned while one is computed; 1: each
    step waits for the one before it."""
    long_prefill_share: float = 0.5
    """Part of a step's tokens that one prompt may take while other prompts wait for theirs. 1: all that is left."""
    paced_step_tokens: int | None = None
    """Tokens of a step while prompts may wait for a later one (pacing.py). None: prompts come as fast as they can, as
    they must where clients wait for first tokens; `LLM`, which has all requests at once, paces large models on GPUs.
    max_num_batched_tokens: no pacing."""
    kv_events: bool = False
    """Keep a log of what the prefix cache holds, for front ends that follow it. Costs microseconds a block."""
    kv_events_address: str | None = None
    """Where each engine core publishes these events to listeners outside (ZMQ PUB): "tcp://*:55{dp_rank}0" or an ipc://
    address; {dp_rank} stands for the replica's number. See engine/kv_event_publisher.py. None: nowhere."""
    kv_events_replay_address: str | None = None
    """Where listeners ask for events that they have missed (ZMQ ROUTER), likewise. None: they cannot."""
    grammar_compile_timeout_s: float = 30.0
    """A request whose grammar is not compiled by then is refused; others go on. It takes milliseconds as a rule."""
    check_worker_rows: bool = False
    """For debugging: tell the workers with each step what they must hold, and end the replica when they do not. Costs
    more than the step itself."""
    max_overtakes: int = 64
    """How many requests of a better priority may be admitted before the oldest waiting one. 0: strict order of
    arrival."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError("scheduler.max_num_seqs", f"must be at least 1, not {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "scheduler.max_num_batched_tokens",
                f"must be at least scheduler.max_num_seqs ({self.max_num_seqs}), not {self.max_num_batched_tokens}",
            )
        if self.max_steps_in_flight not in (1, 2):
            raise ConfigError(
                "scheduler.max_steps_in_flight", f"must be 1 or 2, not {self.max_steps_in_flight}"
            )
        if not 0.0 < self.long_prefill_share <= 1.0:
            raise ConfigError(
                "scheduler.long_prefill_share", f"must be in (0, 1], not {self.long_prefill_share}"
            )
        if self.paced_step_tokens is not None and self.paced_step_tokens < 1:
            raise ConfigError(
                "scheduler.paced_step_tokens", f"must be at least 1, not {self.paced_step_tokens}"
            )
        if self.kv_events_address is not None and not self.kv_events:
            raise ConfigError("scheduler.kv_events_address", "needs scheduler.kv_events")
        if self.kv_events_replay_address is not None and self.kv_events_address is None:
            raise ConfigError("scheduler.kv_events_replay_address", "needs scheduler.kv_events_address")
        if not self.grammar_compile_timeout_s > 0.0:
            raise ConfigError(
                "scheduler.grammar_compile_timeout_s",
                f"must be positive, not {self.grammar_compile_timeout_s}",
            )
        if self.max_overtakes < 0:
            raise ConfigError("scheduler.max_overtakes", f"must not be negative, not {self.max_overtakes}")
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
