"""Worker: one rank's device, process group, weights, KV cache and runner.

Called by: worker_proc.py in a worker process, UniprocExecutor in the caller's own. One thread. All ranks of a
replica go through the same calls in the same order; where they meet (process group, collectives of a step) a rank
that does not come leaves the others waiting, and the executor ends them.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import profile

from .attention.choose import TORCH, choose_for_rank
from .compile_kernels import compile_kernels
from .device import open_device, resolve_dtype, resolve_max_model_len
from .errors import DeviceMemoryError
from .input_batch import InputBatch
from .kernels.linear import activation_dtype
from .memory import count_kv_blocks, cuda_room, kv_cache_shape, make_kv_caches, wait_for_earlier_life
from .memory_report import DeviceMemory, ModelMemory
from .messages import GrammarMasks, ModelRunnerOutput, PhaseTime, RankReport, SchedulerOutput
from .model_loading import build_model, fill_model, fill_model_beside
from .model_runner import ModelRunner, no_masks
from .models.causal_lm import CausalLM
from .models.registry import find_model
from .partition import make_partition
from .profile_run import profile_peak_bytes
from .recorded_steps import record_steps
from .sleep import SleepLevel
from .step_in_flight import StepInFlight
from .tp_group import TensorParallelGroup, connect_group
from .transformer_config import read_transformer_config
from .worker_config import WorkerConfig


class Worker:
    """One rank. `start`, then `initialize_kv_cache`, then steps, then `close`.

    on_phase:    told the name of each phase as it begins: of the start, and of every step
    on_progress: told, while CUDA graphs are recorded, how many of how many are
    """

    def __init__(
        self,
        config: WorkerConfig,
        on_phase: Callable[[str], None],
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._config = config
        self._on_phase = on_phase
        self._on_progress = on_progress
        self._phases: list[PhaseTime] = []
        self._group: TensorParallelGroup | None = None
        self._model: CausalLM | None = None
        self._runner: ModelRunner | None = None
        self._batch: InputBatch | None = None
        self._weight_bytes = 0
        self._num_blocks = 0
        self.recorder: profile | None = None
        """Of the hooks in step_trace.py."""
        self._sleep_level: SleepLevel | None = None

    def start(self) -> RankReport:
        """Open the device, meet the peers, load the weights and find how many KV blocks fit.

        Blocks until the peers are there. Raises ConfigError, WorkerError.
        """
        with torch.inference_mode():
            return self._start()

    def _start(self) -> RankReport:
        config = self._config
        parallel = config.parallel
        with self._phase("device"):
            transformer = read_transformer_config(config.model.path)
            info = open_device(parallel, config.device_index)
            self._device = info.device
            free_bytes = wait_for_earlier_life(info.device, config.expected_free_bytes)
            self._dtype = resolve_dtype(config.model, transformer, info.device)
            self._max_model_len = resolve_max_model_len(config.model, transformer)
            self._vocab_size = transformer.vocab_size
            find_model(transformer.architecture)  # one that we do not know is said before anything is loaded
            partition = make_partition(
                transformer, tp_size=parallel.tensor_parallel_size, tp_rank=config.tp_rank
            )
            self._transformer = transformer
            self._attention = choose_for_rank(
                transformer,
                partition.own,
                block_size=config.cache.block_size,
                max_rows=config.max_num_seqs,
                dtype=self._dtype,
                device=info.device,
            )
        with self._phase("process group"):
            self._group = connect_group(
                rank=config.tp_rank,
                size=parallel.tensor_parallel_size,
                rendezvous=config.rendezvous,
                device=info.device,
                share_device=parallel.share_device,
                arena_fd=config.arena_fd,
            )
        kv_dtype = activation_dtype(self._dtype, info.device)
        self._shape = kv_cache_shape(
            transformer, config.cache, num_kv_heads=partition.own.kv_heads.size, dtype=kv_dtype
        )
        # All ranks go through the same steps, so their exchanges meet here as well.
        if self._attention is not None and self._group.can_be_recorded:
            self._load_and_compile()
        else:
            with self._phase("weights"):
                self._load_model()
        with self._phase("profile"):
            num_kv_blocks = self._count_kv_blocks()
        return RankReport(
            tp_rank=config.tp_rank,
            pid=os.getpid(),
            device=str(info.device),
            device_name=info.name,
            dtype=str(self._dtype).removeprefix("torch."),
            attention_backend=TORCH if self._attention is None else self._attention.name,
            weight_bytes=self._weight_bytes,
            kv_bytes_per_block=self._shape.bytes_per_block,
            num_kv_blocks=num_kv_blocks,
            num_threads=info.num_threads,
            phases=list(self._phases),
            collectives=self._group.name,
            kv_windows=self._shape.windows,
            free_bytes=free_bytes,
        )

    def _load_and_compile(self) -> None:
        """Load the weights and compile meanwhile: their two phases overlap."""
        self._on_phase("weights")
        model = self._build_model()

        def compile_all() -> None:
            with self._phase("kernels"):
                compile_kernels(
                    model,
                    self._shape,
                    max_num_seqs=self._config.max_num_seqs,
                    max_model_len=self._max_model_len,
                    logprobs_mode=self._config.model.logprobs_mode,
                )
            self._on_phase("weights")

        self._weight_bytes, seconds = fill_model_beside(model, self._config.model, self._device, compile_all)
        self._phases.append(PhaseTime(name="weights", duration_s=seconds))
        self._model = model

    def _load_model(self) -> None:
        model = self._build_model()
        self._weight_bytes, _ = fill_model(model, self._config.model, self._device)
        self._model = model

    def _build_model(self) -> CausalLM:
        assert self._group is not None
        size, rank = self._config.parallel.tensor_parallel_size, self._config.tp_rank
        return build_model(
            self._transformer,
            make_partition(self._transformer, tp_size=size, tp_rank=rank),
            self._group,
            self._attention,
            dtype=self._dtype,
            max_positions=self._max_model_len,
            device=self._device,
        )

    @property
    def tp_rank(self) -> int:
        """Which rank this is."""
        return self._config.tp_rank

    @property
    def group(self) -> TensorParallelGroup:
        """The ranks of this replica, for hooks. After `start`."""
        assert self._group is not None, "start() comes first"
        return self._group

    @property
    def rendezvous(self) -> str | None:
        """The file in which the ranks met; None where there was no need of one."""
        return self._config.rendezvous

    @property
    def phases(self) -> list[PhaseTime]:
        """How long each phase of the start took, as far as it has come."""
        return list(self._phases)

    @property
    def device(self) -> torch.device:
        """Where this rank computes. After `start`."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights. After `start`."""
        return self._dtype

    @property
    def model(self) -> CausalLM:
        """This rank's part of the model, for hooks. After `start`."""
        assert self._model is not None, "start() comes first"
        return self._model

    @property
    def max_model_len(self) -> int:
        """Longest request in tokens. After `start`."""
        return self._max_model_len

    @property
    def vocab_size(self) -> int:
        """Rows of the output head. After `start`."""
        return self._vocab_size

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache, the same number of blocks on every rank; on a GPU, record CUDA graphs.

        Raises DeviceMemoryError.
        """
        assert self._model is not None, "start() comes first"
        with torch.inference_mode(), self._phase("KV cache"):
            self._batch = InputBatch(
                max_num_seqs=self._config.max_num_seqs,
                max_model_len=self._max_model_len,
                block_size=self._config.cache.block_size,
                num_kv_groups=len(self._shape.groups),
                vocab_size=self._vocab_size,
                device=self._device,
                logprobs_mode=self._config.model.logprobs_mode,
                is_paged=self._attention is not None,
            )
            self._make_runner(num_blocks)
            self._num_blocks = num_blocks

    def _make_runner(self, num_blocks: int) -> None:
        assert self._model is not None
        assert self._batch is not None
        config = self._config
        kv_caches = make_kv_caches(self._shape, num_blocks, self._device)
        self._runner = ModelRunner(
            self._model,
            kv_caches,
            self._batch,
            windows=self._shape.windows,
            device=self._device,
            on_phase=self._on_phase,
            is_paged=self._attention is not None,
            logprobs_mode=config.model.logprobs_mode,
        )
        if self._attention is None or config.model.enforce_eager or not self.group.can_be_recorded:
            return
        with self._phase("CUDA graphs"):
            recorded = record_steps(
                self._model,
                kv_caches,
                self._batch.on_device,
                config,
                windows=self._shape.windows,
                max_model_len=self._max_model_len,
                max_recorded_tokens=self._attention.max_recorded_tokens,
                device=self._device,
                on_progress=self._on_progress,
            )
        self._runner.use_graphs(recorded)

    def sleep(self, level: SleepLevel) -> None:
        """Give the memory of cache and weights back. No request may be left."""
        if self._sleep_level is None:
            # Also what was captured over these tensors goes with the runner; the rows stay.
            self._runner = None
        if level is SleepLevel.DROP:
            self._model = None
        elif self._model is not None:
            with torch.inference_mode():
                self._model.to("cpu")
        self._sleep_level = level
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Take the memory again; the cache is empty. Raises DeviceMemoryError, WeightsError."""
        if self._sleep_level is None:
            return
        with torch.inference_mode():
            if self._model is None:
                self._load_model()
            assert self._model is not None
            try:
                self._model.to(self._device)
                self._make_runner(self._num_blocks)
            except torch.OutOfMemoryError as error:
                raise DeviceMemoryError(f"weights and cache do not fit on {self._device} any more") from error
        self._sleep_level = None

    def execute_model(
        self, scheduler_output: SchedulerOutput, receive_masks: Callable[[], GrammarMasks] = no_masks
    ) -> ModelRunnerOutput:
        """Compute one step. Any error leaves the KV cache and the peers in doubt: the replica must end.

        receive_masks: see ModelRunner
        """
        return self.begin_step(scheduler_output, receive_masks).wait()

    def begin_step(
        self, scheduler_output: SchedulerOutput, receive_masks: Callable[[], GrammarMasks] = no_masks
    ) -> StepInFlight:
        """Launch one step, and return before a GPU has computed it. As `execute_model` otherwise.

        Raises DeviceMemoryError when the step does not fit beside what else is on the device.
        """
        assert self._runner is not None, "initialize_kv_cache() comes first"
        try:
            with torch.inference_mode():
                return self._runner.begin(scheduler_output, receive_masks)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"a step of {scheduler_output.total_num_scheduled_tokens} tokens of "
                f"{len(scheduler_output.num_scheduled_tokens)} requests does not fit on {self._device}; lower "
                "cache.memory_utilization, scheduler.max_num_batched_tokens or scheduler.max_num_seqs"
            ) from error

    def model_memory(self) -> ModelMemory:
        """Say what this rank holds of the model, and what its GPU has left. After `start`."""
        device = None
        if self._device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
            device = DeviceMemory(
                allocated_bytes=torch.cuda.memory_allocated(self._device),
                reserved_bytes=torch.cuda.memory_reserved(self._device),
                free_bytes=free_bytes,
                total_bytes=total_bytes,
            )
        return ModelMemory(
            weight_bytes=self._weight_bytes,
            kv_cache_bytes=self._num_blocks * self._shape.bytes_per_block,
            device=device,
        )

    def close(self) -> None:
        """Leave the group and free model and cache. Idempotent; waits for no peer."""
        group, self._group = self._group, None
        had_model, self._model = self._model is not None, None
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        if group is not None:
            group.close()
        if had_model and self._device.type == "cuda":
            # A rank in its user's own process leaves its memory to whoever comes next, in another process too.
            gc.collect()
            torch.cuda.empty_cache()

    def _count_kv_blocks(self) -> int:
        assert self._model is not None
        config = self._config
        if self._device.type == "cpu" or config.cache.num_blocks is not None:
            room = config.cache.cpu_kv_bytes
        else:
            try:
                peak = profile_peak_bytes(
                    self._model,
                    self._shape,
                    device=self._device,
                    max_num_seqs=config.max_num_seqs,
                    max_num_batched_tokens=config.max_num_batched_tokens,
                    max_model_len=self._max_model_len,
                    is_paged=self._attention is not None,
                )
            except torch.OutOfMemoryError as error:
                raise DeviceMemoryError(
                    f"a step of {config.max_num_batched_tokens} tokens does not fit on {self._device}; lower "
                    "scheduler.max_num_batched_tokens or raise parallel.tensor_parallel_size"
                ) from error
            room = cuda_room(
                self._device,
                memory_utilization=config.cache.memory_utilization,
                profile_peak_bytes=peak,
                shares_device=config.parallel.share_device,
            )
        return count_kv_blocks(
            config.cache,
            self._shape,
            room_bytes=room,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self._max_model_len,
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._on_phase(name)
        started_at = time.monotonic()
        yield
        self._phases.append(PhaseTime(name=name, duration_s=time.monotonic() - started_at))
