"""Run requests through one Worker, or through the ranks of a replica, without an engine.

Called by: tests of the model side. `StepDriver` plays the scheduler as simply as can be: it gives out blocks in
order and schedules what it is told to.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from phalanx.workers.config import CacheConfig, DType, LoadFormat, ModelConfig, ParallelConfig
from phalanx.workers.messages import ModelRunnerOutput, NewRequest, SchedulerOutput
from phalanx.workers.model_runner import ModelRunner
from phalanx.workers.sampling_params import SamplingParams
from phalanx.workers.worker import Worker
from phalanx.workers.worker_config import WorkerConfig

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0.0, max_tokens=1000)


def make_worker(
    folder: Path,
    *,
    parallel: ParallelConfig | None = None,
    tp_rank: int = 0,
    rendezvous: str | None = None,
    block_size: int = 16,
    num_blocks: int | None = 128,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 256,
    max_model_len: int | None = None,
    load_format: LoadFormat = LoadFormat.AUTO,
    dtype: DType = DType.AUTO,
    enforce_eager: bool = False,
    on_phase: Callable[[str], None] = lambda name: None,
) -> Worker:
    """A worker that has not started."""
    config = WorkerConfig(
        model=ModelConfig(
            path=str(folder),
            load_format=load_format,
            max_model_len=max_model_len,
            dtype=dtype,
            enforce_eager=enforce_eager,
        ),
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks),
        parallel=parallel or ParallelConfig(num_threads=1),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        tp_rank=tp_rank,
        device_index=tp_rank,
        rendezvous=rendezvous,
    )
    return Worker(config, on_phase)


def prompt_step(step: int, request_id: str, removed: list[str]) -> SchedulerOutput:
    """A step with one new request of a few fixed tokens in block 1, seeded; `removed`: requests that end before."""
    token_ids = [7, 30, 211, 4, 99]
    request = NewRequest(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=0,
        block_ids=[1],
        sampling_params=SamplingParams(temperature=0.8),
        seed=11,
    )
    return SchedulerOutput(
        step=step,
        new_requests=[request],
        num_scheduled_tokens={request_id: len(token_ids)},
        num_computed_tokens=[0],
        removed_request_ids=removed,
    )


class RankThreads:
    """The ranks of one replica as threads of this process; looks like a single worker, and compares their answers."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = list(workers)
        self._pool = ThreadPoolExecutor(len(self.workers), thread_name_prefix="rank")

    def start(self) -> "RankThreads":
        reports = self._on_all(lambda worker: worker.start())
        self.num_kv_groups = len(reports[0].kv_windows)
        self._on_all(lambda worker: worker.initialize_kv_cache(128))
        return self

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        outputs = self._on_all(lambda worker: worker.execute_model(scheduler_output))
        assert all(output == outputs[0] for output in outputs), outputs
        return outputs[0]

    def close(self) -> None:
        self._on_all(lambda worker: worker.close())
        self._pool.shutdown()

    def _on_all(self, call: Callable[[Worker], T]) -> list[T]:
        return [future.result(timeout=60) for future in [self._pool.submit(call, w) for w in self.workers]]


@dataclass
class _Held:
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int
    num_columns: int


@dataclass
class StepDriver:
    """Scheduler for a handful of requests. worker: anything with `execute_model`.

    blocks: of each request, column by column: one block of each KV cache group
    """

    worker: Worker | RankThreads | ModelRunner
    block_size: int = 16
    step: int = 0
    num_kv_groups: int = 1
    next_block: int = 1
    held: dict[str, _Held] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    new: list[NewRequest] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        num_prompt_tokens: int | None = None,
        shared_block_ids: Sequence[int] = (),
        seed: int = 7,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        """Hold a request from the next step on. shared_block_ids: full blocks whose KV is in the cache."""
        num_computed = len(shared_block_ids) // self.num_kv_groups * self.block_size
        blocks = [*shared_block_ids]
        while len(blocks) // self.num_kv_groups * self.block_size < len(token_ids):
            blocks += self._take_column()
        self.blocks[request_id] = blocks
        num_prompt = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        self.held[request_id] = _Held(
            list(token_ids), num_prompt, num_computed, len(blocks) // self.num_kv_groups
        )
        self.new.append(
            NewRequest(
                request_id=request_id,
                token_ids=list(token_ids),
                num_prompt_tokens=num_prompt,
                num_computed_tokens=num_computed,
                block_ids=list(blocks),
                sampling_params=params,
                seed=seed,
                stop_token_ids=stop_token_ids,
            )
        )

    def remove(self, request_id: str) -> None:
        """Drop a request with the next step."""
        del self.held[request_id]
        self.removed.append(request_id)

    def run_step(self, num_tokens: dict[str, int] | None = None) -> ModelRunnerOutput:
        """Run one step; None: all that every request has left."""
        new, removed = self.new, self.removed
        self.new, self.removed = [], []
        if num_tokens is None:
            num_tokens = {name: len(one.token_ids) - one.num_computed for name, one in self.held.items()}
        new_ids = {request.request_id for request in new}
        grown = {}
        num_computed = [self.held[request_id].num_computed for request_id in num_tokens]
        for request_id, count in num_tokens.items():
            one = self.held[request_id]
            added: list[int] = []
            while one.num_columns * self.block_size < one.num_computed + count:
                added += self._take_column()
                one.num_columns += 1
            self.blocks[request_id] += added
            if added and request_id not in new_ids:
                grown[request_id] = added
        self.step += 1
        output = self.worker.execute_model(
            SchedulerOutput(
                step=self.step,
                new_requests=new,
                num_scheduled_tokens=num_tokens,
                num_computed_tokens=num_computed,
                new_block_ids=grown,
                removed_request_ids=removed,
            )
        )
        for request_id, count in num_tokens.items():
            self.held[request_id].num_computed += count
        for request_id, token_id in zip(output.request_ids, output.sampled_token_ids, strict=True):
            self.held[request_id].token_ids.append(token_id)
        return output

    def output_tokens(self, request_id: str) -> list[int]:
        """What was made so far."""
        one = self.held[request_id]
        return one.token_ids[one.num_prompt_tokens :]

    def generate(self, request_id: str, num_tokens: int) -> list[int]:
        """Run steps with all requests until this one has `num_tokens` output tokens."""
        while len(self.output_tokens(request_id)) < num_tokens:
            self.run_step()
        return self.output_tokens(request_id)

    def columns(self, request_id: str, first: int, stop: int) -> list[int]:
        """Block ids of some columns of a request's table."""
        return self.blocks[request_id][first * self.num_kv_groups : stop * self.num_kv_groups]

    def _take_column(self) -> list[int]:
        first = self.next_block
        self.next_block += self.num_kv_groups
        return list(range(first, self.next_block))
