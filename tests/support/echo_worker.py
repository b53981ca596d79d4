"""A worker without a model: answers each step with its number, and fails where it is told to.

Imported by name in worker processes (`worker_class="support.echo_worker:EchoWorker"`) and by tests.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.workers.config import CacheConfig, ModelConfig, ParallelConfig
from phalanx.workers.executor import make_worker_configs
from phalanx.workers.memory_report import ModelMemory
from phalanx.workers.messages import GrammarMasks, ModelRunnerOutput, RankReport, SchedulerOutput
from phalanx.workers.step_in_flight import FinishedStep
from phalanx.workers.worker_config import WorkerConfig
from support.children import wait_until

ECHO_WORKER = "support.echo_worker:EchoWorker"
VOCAB_SIZE = 100
START = "weights"
KV_CACHE = "KV cache"
CLOSE = "close"
START_PHASES = ("device", "process group", "weights", "profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong on one rank in one step.

    action: raise, exit, kill, hang, wait_for_peers (hang in a collective), stop (SIGSTOP), garbage (a reply that
            cannot be encoded), late_raise (once there is a file "answered" in the model's folder), wait_for_file
            (until there is a file "go"), nap (take 0.3 s)
    step:   number of a step, or a phase: one of the start, KV_CACHE, CLOSE
    A rank that is about to hang leaves the file "held-<rank>" in the model's folder.
    """

    action: str
    rank: int
    step: int | str


class EchoWorker:
    """Samples token `step` for every request; for one with a grammar, the first byte of its masks instead."""

    def __init__(self, config: WorkerConfig, on_phase: Callable[[str], None]) -> None:
        self._config = config
        self._on_phase = on_phase
        self._folder = Path(config.model.path)
        told = json.loads((self._folder / "faults.json").read_text(encoding="utf-8"))
        self._faults = [Fault(**fault) for fault in told]

    @property
    def tp_rank(self) -> int:
        return self._config.tp_rank

    def start(self) -> RankReport:
        for phase in START_PHASES:
            self._on_phase(phase)
            self._meet_faults(phase)
        return RankReport(
            tp_rank=self._config.tp_rank,
            pid=os.getpid(),
            device="cpu",
            device_name="echo",
            dtype="float32",
            attention_backend="none",
            weight_bytes=0,
            kv_bytes_per_block=1,
            num_kv_blocks=10 + self._config.tp_rank,
            num_threads=int(os.environ["OMP_NUM_THREADS"]),
            phases=[],
        )

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self._meet_faults(KV_CACHE)

    def begin_step(
        self, scheduler_output: SchedulerOutput, receive_masks: Callable[[], GrammarMasks]
    ) -> FinishedStep:
        return FinishedStep(self._compute(scheduler_output, receive_masks))

    def _compute(
        self, scheduler_output: SchedulerOutput, receive_masks: Callable[[], GrammarMasks]
    ) -> ModelRunnerOutput:
        self._on_phase("forward")
        if self._meet_faults(scheduler_output.step):
            return ModelRunnerOutput(step=1 << 80, request_ids=[], sampled_token_ids=[])
        request_ids = list(scheduler_output.num_scheduled_tokens)
        sampled = dict.fromkeys(request_ids, scheduler_output.step)
        if scheduler_output.needs_masks:
            masks = receive_masks()
            sampled.update(dict.fromkeys(masks.request_ids, masks.bits[0]))
            self._on_phase("sampling")
        return ModelRunnerOutput(
            step=scheduler_output.step, request_ids=request_ids, sampled_token_ids=list(sampled.values())
        )

    def model_memory(self) -> ModelMemory:
        return ModelMemory(weight_bytes=3, kv_cache_bytes=4, device=None)

    def close(self) -> None:
        self._meet_faults(CLOSE)

    def _meet_faults(self, step: int | str) -> bool:
        """Carry out the faults of this rank and step; True when the reply shall be garbage."""
        for fault in self._faults:
            if (fault.rank, fault.step) != (self._config.tp_rank, step):
                continue
            match fault.action:
                case "raise":
                    raise ArithmeticError(f"rank {fault.rank} was told to fail")
                case "exit":
                    os._exit(9)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "hang":
                    self._hang()
                case "wait_for_peers":
                    self._on_phase("collective")
                    self._hang()
                case "nap":
                    time.sleep(0.3)
                case "wait_for_file":
                    wait_until((self._folder / "go").exists, timeout_s=30.0)
                case "late_raise":
                    wait_until((self._folder / "answered").exists, timeout_s=30.0)
                    raise ArithmeticError(f"rank {fault.rank} was told to fail")
                case "garbage":
                    return True
        return False

    def _hang(self) -> None:
        """Wait for ever without looking at signals, as a call into a device library does."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        (self._folder / f"held-{self.tp_rank}").touch()
        while True:
            time.sleep(60)


def write_echo_model(folder: Path, faults: Sequence[Fault] = ()) -> str:
    """Make a model's folder for EchoWorker; return its path."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    told = json.dumps([asdict(fault) for fault in faults])
    (folder / "faults.json").write_text(told, encoding="utf-8")
    return str(folder)


def echo_configs(folder: Path, num_ranks: int, faults: Sequence[Fault] = ()) -> list[WorkerConfig]:
    """Return the configuration of `num_ranks` echo workers."""
    return make_worker_configs(
        model=ModelConfig(path=write_echo_model(folder, faults)),
        cache=CacheConfig(),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks),
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )


def echo_step(step: int, num_requests: int = 1, *, needs_masks: bool = False) -> SchedulerOutput:
    """Return a step of `num_requests` requests with one token each."""
    return SchedulerOutput(
        step=step,
        new_requests=[],
        num_scheduled_tokens={f"request-{index}": 1 for index in range(num_requests)},
        num_computed_tokens=[step] * num_requests,
        removed_request_ids=[],
        needs_masks=needs_masks,
    )


def echo_masks(step: int, token_id: int) -> GrammarMasks:
    """Return masks that make the first request of a step sample `token_id`."""
    return GrammarMasks(step=step, request_ids=["request-0"], bits=bytes([token_id]))
