"""What a worker must be told: model, cache, parallelism, executor. Frozen sections of the configuration tree.

Called by: launch/config.py builds them; each component gets its own section, never the tree. They cross
to the child processes as msgpack. What is learnt later (number of KV blocks) is a return value, not a setting.
"""

from dataclasses import dataclass
from enum import StrEnum

from ..shm.errors import ConfigError

DEFAULT_MAX_LOGPROBS = 20
"""As OpenAI has it."""


class DeviceType(StrEnum):
    """Where a rank computes. AUTO becomes CUDA or CPU before any process starts."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DType(StrEnum):
    """Type of weights, activations and KV cache. AUTO: that of the checkpoint on CUDA, float32 on CPU.

    A CPU that multiplies no numbers of the type keeps activations and KV cache in float32.
    """

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class LoadFormat(StrEnum):
    """Where weights come from."""

    AUTO = "auto"
    """The checkpoint in the model's folder."""
    DUMMY = "dummy"
    """Random numbers, uniform in ±1e-3: for benchmarks."""


class LogprobsMode(StrEnum):
    """Which numbers are given as log-probabilities. RAW: as the model made them, a grammar's mask applied.
    PROCESSED: as the token is drawn from them, after everything; for greedy requests without temperature and filters.
    """

    RAW_LOGPROBS = "raw_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGPROBS = "processed_logprobs"
    PROCESSED_LOGITS = "processed_logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and in which numbers."""

    path: str
    """Local folder with config.json, or a GGUF file. A hub name has been turned into its folder before this section
    is built."""
    dtype: DType = DType.AUTO
    load_format: LoadFormat = LoadFormat.AUTO
    enforce_eager: bool = False
    """Record no CUDA graphs: every step launches its kernels one by one. Slower; for debugging, and for memory."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens. None: what the model was trained for."""
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    """Most log-probabilities that a client may ask for at each token. -1: no limit, the whole vocabulary included."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    """Which numbers clients get as log-probabilities."""

    def __post_init__(self) -> None:
        if self.max_logprobs < -1:
            raise ConfigError("model.max_logprobs", f"must be at least -1, not {self.max_logprobs}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError("model.max_model_len", f"must be at least 1, not {self.max_model_len}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache of one replica."""

    block_size: int = 16
    """Tokens in one KV block. A power of two. On a GPU the default is 64 (engine/device_defaults.py)."""
    num_blocks: int | None = None
    """KV blocks of one rank, the null block included. None: as many as memory holds, by profiling. A model whose
    layers see different windows takes one for each of its KV cache groups."""
    memory_utilization: float = 0.9
    """Part of a GPU's memory that one rank may use in all: weights, activations and KV cache."""
    cpu_kv_bytes: int = 1 << 30
    """Bytes of KV cache of one rank on CPU, when num_blocks is None."""
    enable_prefix_caching: bool = True
    """Keep finished blocks, and reuse them for prompts that begin alike."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError("cache.block_size", f"must be a power of two, not {self.block_size}")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError("cache.num_blocks", f"must be at least 2, not {self.num_blocks}")
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError("cache.memory_utilization", f"must be in (0, 1], not {self.memory_utilization}")
        if self.cpu_kv_bytes < 1 << 20:
            raise ConfigError("cache.cpu_kv_bytes", f"must be at least 1 MiB, not {self.cpu_kv_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How one replica is split over devices."""

    tensor_parallel_size: int = 1
    """Ranks that share every layer. At most the number of attention heads."""
    device: DeviceType = DeviceType.AUTO
    share_device: bool = False
    """For tests only: all ranks on the first GPU, collectives staged through the host (NCCL refuses that)."""
    num_threads: int | None = None
    """Compute threads of one rank on CPU. None: cores of the host divided by the ranks on it."""

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ConfigError(
                "parallel.tensor_parallel_size", f"must be at least 1, not {self.tensor_parallel_size}"
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError("parallel.num_threads", f"must be at least 1, not {self.num_threads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """How an engine core talks with its workers, and how long it waits."""

    request_ring_bytes: int = 32 << 20
    """Shared memory of the ring that broadcasts steps, reserved when the workers start. What takes more than half of it
    goes through sockets instead."""
    max_oversize_bytes: int = 1 << 30
    """Of calls that go through sockets: bytes that a rank has not read yet."""
    reply_ring_bytes: int = 8 << 20
    """Shared memory of each worker's ring of replies."""
    start_timeout_s: float = 600.0
    """From the spawn of the first worker until all have loaded the model."""
    step_timeout_s: float = 300.0
    """For the answer to one step."""
    call_timeout_s: float = 60.0
    """For the answer to a hook, when the caller names no time."""
    stop_timeout_s: float = 5.0
    """For workers to leave by themselves, before they are killed."""
    stall_report_s: float = 30.0
    """A wait for the ranks that is longer is reported in the log, with the stack of who is behind; then each time
    after twice as long."""
    hooks: tuple[str, ...] = ()
    """Functions ("module:function") that may be called on every rank by their name, with collective_rpc."""
    bind_numa: bool = True
    """On a host with several memory nodes, bind each rank to the cores of one: its GPU's, or its share of them."""

    def __post_init__(self) -> None:
        names = [entry.partition(":")[2] for entry in self.hooks]
        for entry, name in zip(self.hooks, names, strict=True):
            if not entry.partition(":")[0] or not name.isidentifier():
                raise ConfigError("executor.hooks", f"must be of the form module:function, not {entry!r}")
            if names.count(name) > 1:
                raise ConfigError("executor.hooks", f"there are two hooks of the name {name}")
        for name in ("request_ring_bytes", "reply_ring_bytes"):
            if getattr(self, name) < 1 << 16:
                raise ConfigError(f"executor.{name}", "must be at least 64 KiB")
        if self.max_oversize_bytes < self.request_ring_bytes:
            raise ConfigError("executor.max_oversize_bytes", "must be at least executor.request_ring_bytes")
        for name in (
            "start_timeout_s",
            "step_timeout_s",
            "call_timeout_s",
            "stop_timeout_s",
            "stall_report_s",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"executor.{name}", "must be positive")
