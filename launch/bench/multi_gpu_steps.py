"""One tensor parallel width, step by step: time in sums over the ranks, and what a step costs beside the ranks.

Called by: multi_gpu.py, in its process. An engine core here feeds the executor that serves, whose workers are the ones
that serve with clocks in them (workers/measured_worker.py); width 1 is a process with one rank. For each number of
running requests:

    decode steps, each waited for before the next     the executor's share
    decode steps, as many in flight as serving has    how much of it the device hides
    decode steps, recorded                            sums
    steps with one prompt beside the decoding         sums
    steps with as many prompts as a step takes        sums

Raises ConfigError, BenchError, ProcessError.
"""

import random
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from ...engine.config import EngineConfig
from ...engine.core import EngineCore
from ...engine.engine_options import make_engine_config
from ...engine.messages import EngineCoreRequest
from ...shm.channel import EXECUTOR_RANK
from ...shm.codec import FrameDecoder, FrameEncoder, FrameKind
from ...shm.errors import ConfigError
from ...workers.calls import Call, ExecuteModel
from ...workers.executor import make_worker_configs
from ...workers.multiproc_executor import MultiprocExecutor
from ...workers.sampling_params import SamplingParams
from ...workers.step_measures import MEASURE_HOOKS, MEASURED_WORKER, MeasurePlan, RankMeasures
from ...workers.transformer_config import read_transformer_config
from .errors import BenchError
from .stats import Summary, summarize
from .step_rows import NUM_SKIPPED, HostRow, SumRow, host_row, host_share, sum_row
from .timed_executor import TimedExecutor

MAX_PROMPTS_IN_STEP = 64
_NUM_WARM_UP = 4
_PROMPT_TOKENS_IN_STEP = 1024
"""A step takes at least so many while requests are begun."""
_NUM_CODED = 8
"""Times that each of the kept frames is encoded and decoded again."""
_HOOK_TIMEOUT_S = 120.0
"""To end a measurement: a profiler's record of some steps has tens of thousands of entries."""


class StepsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure at each width.

    requests:     numbers of running requests
    prompt_len:   tokens of each prompt
    num_steps:    of each measurement of the executor
    num_recorded: of each measurement of sums: a profiler keeps all their kernels
    """

    requests: Sequence[int]
    prompt_len: int
    num_steps: int = 64
    num_recorded: int = 12

    @property
    def output_len(self) -> int:
        """Tokens that a running request makes while others are begun and all are measured, and some more."""
        num_begun = max(self.requests) * self.prompt_len // _PROMPT_TOKENS_IN_STEP
        num_measured = max(2 * (self.num_steps + NUM_SKIPPED), 3 * (self.num_recorded + NUM_SKIPPED))
        return num_begun + num_measured + 8 * _NUM_WARM_UP


class StepMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured: of sums, and of the executor's share."""

    sums: list[SumRow]
    host: list[HostRow]


def measure_steps(
    model: str, width: int, plan: StepsPlan, *, device: str, has_dummy_weights: bool
) -> StepMeasures:
    """Measure on `width` ranks. model: a folder."""
    transformer = read_transformer_config(model)
    max_model_len = plan.prompt_len + plan.output_len
    if max_model_len > transformer.max_position_embeddings:
        raise ConfigError(
            "--input-len",
            f"needs {max_model_len} tokens of context, and the model has {transformer.max_position_embeddings}",
        )
    config = make_engine_config(
        model,
        tensor_parallel_size=width,
        device=device,
        load_format="dummy" if has_dummy_weights else "auto",
        max_model_len=max_model_len,
        # Prompts of two steps in flight beside those that run.
        max_num_seqs=max(plan.requests) + 3 * MAX_PROMPTS_IN_STEP,
        enable_prefix_caching=False,
        hooks=MEASURE_HOOKS,
    )
    executor = TimedExecutor(
        MultiprocExecutor(
            make_worker_configs(
                model=config.model,
                cache=config.cache,
                parallel=config.parallel,
                max_num_seqs=config.scheduler.max_num_seqs,
                max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            ),
            config=config.executor,
            role_prefix="bench",
            worker_class=MEASURED_WORKER,
        )
    )
    sums: list[SumRow] = []
    host: list[HostRow] = []
    try:
        core = EngineCore(config, executor, executor.start())
        # A profiler leaves traces in its process: first what is measured without one.
        for num_requests in plan.requests:
            with _Load(core, executor, config, plan, num_requests, name="host") as load:
                host.append(load.measure_host())
        for num_requests in plan.requests:
            with _Load(core, executor, config, plan, num_requests, name="sums") as load:
                sums += load.measure_sums(transformer.num_hidden_layers)
    finally:
        executor.close(reason="measured")
    return StepMeasures(sums=sums, host=host)


class _Load:
    """So many running requests, and prompts beside them when wanted. Inside the `with` block all of them decode.

    name: begins its requests' names; no two loads of one engine core have the same
    """

    def __init__(
        self,
        core: EngineCore,
        executor: TimedExecutor,
        config: EngineConfig,
        plan: StepsPlan,
        num_requests: int,
        *,
        name: str,
    ) -> None:
        self._core = core
        self._executor = executor
        self._plan = plan
        self._num_requests = num_requests
        self._name = name
        self._rng = random.Random(num_requests)
        self._num_added = 0
        room = config.scheduler.max_num_batched_tokens - num_requests
        self._max_prompts = max(1, min(MAX_PROMPTS_IN_STEP, room // plan.prompt_len))

    def __enter__(self) -> Self:
        for _ in range(self._num_requests):
            self._add(self._plan.output_len)
        while (stats := self._core.stats()).num_waiting or stats.num_prefill_tokens:
            self._core.step()
            if stats.num_preemptions:
                break
        self._run(_NUM_WARM_UP, num_prompts=0)
        self._check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._core.abort_requests([self._request_id(number) for number in range(self._num_added)])
            while self._core.has_work:
                self._core.step()

    def measure_host(self) -> HostRow:
        """Measure decode steps one by one, then as many in flight as the engine has."""
        self._executor.is_alone = True
        alone = host_share(self._measure(self._plan.num_steps, with_sums=False), self._executor.sent)
        self._executor.is_alone = False
        ranks = self._measure(self._plan.num_steps, with_sums=False)
        self._check()
        encode, decode = self._code_again()
        return host_row(
            alone,
            ranks,
            self._executor.sent,
            num_requests=self._num_requests,
            encode=encode,
            decode=decode,
        )

    def measure_sums(self, num_layers: int) -> list[SumRow]:
        """Record decode steps, and steps with prompts."""
        kinds = {"decode": 0, f"1 prompt of {self._plan.prompt_len}": 1}
        if self._max_prompts > 1:
            kinds[f"{self._max_prompts} prompts of {self._plan.prompt_len}"] = self._max_prompts
        rows = []
        for kind, num_prompts in kinds.items():
            try:
                ranks = self._measure(self._plan.num_recorded, with_sums=True, num_prompts=num_prompts)
            except BenchError as error:
                # A profiler that this machine does not have must not take the other numbers along.
                rows.append(
                    SumRow(
                        width=len(self._core.report.ranks),
                        num_requests=self._num_requests,
                        kind=kind,
                        problem=str(error),
                    )
                )
                continue
            rows.append(
                sum_row(
                    ranks,
                    self._executor.sent,
                    num_requests=self._num_requests,
                    kind=kind,
                    has_prompts=num_prompts > 0,
                    num_layers=num_layers,
                )
            )
        self._check()
        return rows

    def _measure(self, num_steps: int, *, with_sums: bool, num_prompts: int = 0) -> list[RankMeasures]:
        """Run steps between the hooks; returns what the ranks say, by tp_rank. Raises BenchError."""
        plan = MeasurePlan(max_steps=num_steps + 2 * NUM_SKIPPED, with_sums=with_sums)
        for outcome in self._core.collective_rpc(
            "begin_measuring", plan, result_type=object, timeout_s=_HOOK_TIMEOUT_S
        ):
            if outcome.error is not None:
                raise BenchError(f"rank {outcome.tp_rank} does not measure its steps: {outcome.error}")
        self._run(num_steps + NUM_SKIPPED, num_prompts)
        ranks = []
        for ended in self._core.collective_rpc(
            "end_measuring", result_type=RankMeasures, timeout_s=_HOOK_TIMEOUT_S
        ):
            if ended.result is None:
                raise BenchError(f"rank {ended.tp_rank} has not measured its steps: {ended.error}")
            ranks.append(ended.result)
        return ranks

    def _run(self, num_steps: int, num_prompts: int) -> None:
        for _ in range(num_steps):
            for _ in range(num_prompts):
                self._add(1)
            self._core.step()

    def _add(self, num_output_tokens: int) -> None:
        vocab_size = self._core.report.vocab_size
        self._core.add_request(
            EngineCoreRequest(
                request_id=self._request_id(self._num_added),
                client_index=0,
                prompt_token_ids=[self._rng.randrange(vocab_size) for _ in range(self._plan.prompt_len)],
                sampling_params=SamplingParams(
                    max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True
                ),
                eos_token_ids=(),
                seed=self._num_added,
                arrived_at=time.monotonic(),
            )
        )
        self._num_added += 1

    def _request_id(self, number: int) -> str:
        return f"{self._name}-{self._num_requests}-{number}"

    def _check(self) -> None:
        stats = self._core.stats()
        if stats.num_preemptions or stats.num_running < self._num_requests:
            raise BenchError(f"{self._num_requests} requests do not fit into the KV cache together")

    def _code_again(self) -> tuple[Summary, Summary]:
        """Return the µs to encode the last steps as the executor does, and to decode them as a rank does."""
        encoder = FrameEncoder(epoch=0, rank=EXECUTOR_RANK)
        decoder = FrameDecoder[Call]({FrameKind.REQUEST: Call})
        encode, decode = [], []
        for scheduled in self._executor.kept:
            for _ in range(_NUM_CODED):
                began_at = time.perf_counter()
                pieces = encoder.encode(FrameKind.REQUEST, 1, ExecuteModel(scheduled))
                encode.append(1e6 * (time.perf_counter() - began_at))
                frame = memoryview(b"".join(pieces))
                began_at = time.perf_counter()
                decoder.decode(frame)
                decode.append(1e6 * (time.perf_counter() - began_at))
        return summarize(encode), summarize(decode)
