"""Builders for the engine's tests, and a model so simple that its output can be computed by hand."""

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.engine.config import EngineConfig, SchedulerConfig
from phalanx.engine.kv_cache_manager import KVCacheManager
from phalanx.engine.messages import EngineCoreOutput, EngineCoreRequest
from phalanx.engine.request import Request
from phalanx.engine.scheduler import Scheduler
from phalanx.workers.config import CacheConfig, ModelConfig
from phalanx.workers.messages import (
    ExecutorReport,
    GrammarMasks,
    ModelRunnerOutput,
    PhaseTime,
    RankReport,
    SchedulerOutput,
)
from phalanx.workers.sampling_params import SamplingParams

from .step_outputs import write_out

VOCAB_SIZE = 97


def next_token(token_ids: list[int], vocab_size: int = VOCAB_SIZE) -> int:
    """The fake model: the next token is a function of all tokens before it."""
    value = 17
    for token_id in token_ids:
        value = (value * 31 + token_id + 7) % 1_000_003
    return value % vocab_size


def make_request(
    request_id: str = "r0",
    *,
    prompt_token_ids: list[int] | None = None,
    num_prompt_tokens: int = 5,
    client_index: int = 0,
    eos_token_ids: tuple[int, ...] = (),
    attempt: int = 0,
    output_token_ids: list[int] | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    group_id: str | None = None,
    deadline_at: float | None = None,
    **params: object,
) -> EngineCoreRequest:
    if prompt_token_ids is None:
        prompt_token_ids = [(i * 13 + len(request_id)) % VOCAB_SIZE for i in range(num_prompt_tokens)]
    return EngineCoreRequest(
        request_id=request_id,
        client_index=client_index,
        prompt_token_ids=prompt_token_ids,
        sampling_params=SamplingParams(**params),  # type: ignore[arg-type]
        eos_token_ids=eos_token_ids,
        seed=1,
        arrived_at=0.0,
        attempt=attempt,
        output_token_ids=output_token_ids or [],
        priority=priority,
        cache_salt=cache_salt,
        group_id=group_id,
        deadline_at=deadline_at,
    )


def make_state(
    request_id: str = "r0", *, number: int = 0, max_model_len: int = 1024, **fields: Any
) -> Request:
    """A request as the scheduler holds it."""
    return Request(make_request(request_id, **fields), number=number, max_model_len=max_model_len)


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    max_model_len: int = 1024,
    windows: Sequence[int | None] = (None,),
    **config: float,
) -> tuple[Scheduler, KVCacheManager]:
    section = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **config})  # type: ignore[arg-type]
    kv_cache_manager = KVCacheManager(
        num_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        windows=windows,
        max_step_tokens=section.max_num_batched_tokens,
    )
    scheduler = Scheduler(section, kv_cache_manager, max_model_len=max_model_len, vocab_size=VOCAB_SIZE)
    return scheduler, kv_cache_manager


def make_report(*, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 1024) -> ExecutorReport:
    rank = RankReport(
        tp_rank=0,
        pid=1,
        device="cpu",
        device_name="fake",
        dtype="float32",
        attention_backend="fake",
        weight_bytes=0,
        kv_bytes_per_block=1,
        num_kv_blocks=num_blocks,
        num_threads=1,
        phases=[PhaseTime("weights", 0.0)],
    )
    return ExecutorReport(
        num_kv_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        ranks=[rank],
    )


def make_engine_config(**scheduler: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path="/nowhere"),
        cache=CacheConfig(block_size=4, num_blocks=64),
        scheduler=SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **scheduler}),
    )


class FakeModelRunner:
    """Rows as the workers keep them, with every check that a real worker would trip over.

    It keeps a KV "cache" of token ids by (block, offset), so that a prefix hit on a block with other contents,
    or a block reused too early, becomes another token. windows: of the KV cache groups.
    """

    def __init__(
        self,
        *,
        block_size: int = 4,
        vocab_size: int = VOCAB_SIZE,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self.vocab_size = vocab_size
        self.rows: dict[str, tuple[list[int], list[int]]] = {}
        self.num_computed: dict[str, int] = {}
        self.cells: dict[tuple[int, int], int] = {}

    def execute(self, scheduled: SchedulerOutput, given: GrammarMasks | None = None) -> ModelRunnerOutput:
        assert (given is not None) == scheduled.needs_masks
        for request_id in scheduled.removed_request_ids:
            del self.rows[request_id]
            del self.num_computed[request_id]
        for new in scheduled.new_requests:
            assert new.request_id not in self.rows
            self.rows[new.request_id] = (list(new.token_ids), list(new.block_ids))
            self.num_computed[new.request_id] = new.num_computed_tokens
        for request_id, block_ids in scheduled.new_block_ids.items():
            self.rows[request_id][1].extend(block_ids)
        for request_id, state in scheduled.row_states.items():
            token_ids, block_ids = self.rows[request_id]
            assert state.num_tokens == len(token_ids)
            assert state.known_digest == zlib.crc32(np.array(token_ids[: state.num_known], dtype="<i4"))
            assert len(state.block_ids) == len(block_ids)
            pairs = zip(state.block_ids, block_ids, strict=True)
            assert all(expected in (0, held) for expected, held in pairs)
        held = [self.num_computed[request_id] for request_id in scheduled.num_scheduled_tokens]
        assert held == scheduled.num_computed_tokens
        assert {new.request_id for new in scheduled.new_requests} <= scheduled.num_scheduled_tokens.keys()
        assert scheduled.new_block_ids.keys() <= scheduled.num_scheduled_tokens.keys()

        for request_id, count in scheduled.num_scheduled_tokens.items():
            assert count > 0
            token_ids, block_ids = self.rows[request_id]
            first = self.num_computed[request_id]
            assert first + count <= len(token_ids)
            assert len(block_ids) % len(self.windows) == 0
            for group in range(len(self.windows)):
                for position in range(first, first + count):
                    self.cells[self._cell(block_ids, group, position)] = token_ids[position]
        masks = {}
        if given is not None and given.request_ids:
            assert given.step == scheduled.step
            words = np.frombuffer(given.bits, dtype=np.uint8)
            rows = np.unpackbits(words.reshape(len(given.request_ids), -1), axis=1, bitorder="little")
            masks = dict(zip(given.request_ids, rows, strict=True))
        request_ids, sampled = [], []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            token_ids, block_ids = self.rows[request_id]
            seen = self._attend(token_ids, block_ids, self.num_computed[request_id], count)
            self.num_computed[request_id] += count
            if self.num_computed[request_id] == len(token_ids):
                token_id = next_token(seen, self.vocab_size)
                if request_id in masks:
                    choices = np.flatnonzero(masks.pop(request_id))
                    token_id = int(choices[token_id % len(choices)])
                token_ids.append(token_id)
                request_ids.append(request_id)
                sampled.append(token_id)
        assert not masks, "a mask for a request that does not sample"
        return ModelRunnerOutput(step=scheduled.step, request_ids=request_ids, sampled_token_ids=sampled)

    def _attend(self, token_ids: list[int], block_ids: list[int], first: int, count: int) -> list[int]:
        """Read what the queries of a step see; what no group of layers sees is as it should be."""
        seen = token_ids[: first + count]
        for group, window in enumerate(self.windows):
            start = 0 if window is None else max(0, first - window + 1)
            for position in range(start, first + count):
                token_id = self.cells[self._cell(block_ids, group, position)]
                if token_id != token_ids[position]:
                    seen[position] = token_id
        return seen

    def _cell(self, block_ids: list[int], group: int, position: int) -> tuple[int, int]:
        block_id = block_ids[position // self.block_size * len(self.windows) + group]
        assert block_id != 0
        return block_id, position % self.block_size


def simulate(
    request: EngineCoreRequest, *, max_model_len: int = 1024, vocab_size: int = VOCAB_SIZE
) -> list[int]:
    """Output tokens of one request that runs alone, by the plainest code there is."""
    tokens = [*request.prompt_token_ids, *request.output_token_ids]
    params = request.sampling_params
    while True:
        token_id = next_token(tokens, vocab_size)
        tokens.append(token_id)
        num_output = len(tokens) - len(request.prompt_token_ids)
        is_stop = token_id in request.eos_token_ids or token_id in params.stop_token_ids
        if is_stop and num_output >= params.min_tokens:
            break
        if num_output == params.max_tokens or len(tokens) >= max_model_len:
            break
    return tokens[len(request.prompt_token_ids) :]


class Pipeline:
    """Steps in flight without threads: a step is computed when all it needs is there, and its result is held back.

    num_ahead: steps that were submitted before their masks could be known
    """

    def __init__(self, scheduler: Scheduler, runner: FakeModelRunner, *, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.depth = depth
        self.num_ahead = 0
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput | None]] = deque()
        self.steps: list[SchedulerOutput] = []

    def submit(self) -> None:
        """Submit as many steps as may be in flight."""
        while len(self.in_flight) < self.depth:
            scheduled = self.scheduler.schedule()
            self.scheduler.check_invariants()
            if scheduled is None:
                return
            self.steps.append(scheduled)
            assert all(result is not None for _, result in self.in_flight)
            self.in_flight.append((scheduled, None))
            if not scheduled.needs_masks:
                self.in_flight[-1] = (scheduled, self.runner.execute(scheduled))
            self.num_ahead += scheduled.needs_masks and len(self.in_flight) > 1
            self._give_masks()

    def take(self) -> list[EngineCoreOutput]:
        """Take over the oldest result. Returns one output for each request that got a token."""
        scheduled, result = self.in_flight.popleft()
        assert result is not None
        outputs = self.scheduler.update_from_output(scheduled, result)
        self.scheduler.check_invariants()
        self._give_masks()
        return write_out(outputs)

    def _give_masks(self) -> None:
        """Compute the oldest step, once it is that, if it needs masks."""
        if self.in_flight and self.in_flight[0][1] is None:
            scheduled = self.in_flight[0][0]
            self.in_flight[0] = (
                scheduled,
                self.runner.execute(scheduled, self.scheduler.fill_grammar_masks()),
            )


def run_to_end(
    scheduler: Scheduler,
    runner: FakeModelRunner,
    *,
    after_step: Callable[[], None] = lambda: None,
    max_steps: int = 10_000,
    depth: int = 1,
) -> list[EngineCoreOutput]:
    pipeline = Pipeline(scheduler, runner, depth=depth)
    outputs: list[EngineCoreOutput] = []
    for _ in range(max_steps):
        pipeline.submit()
        if not pipeline.in_flight:
            return outputs
        outputs += pipeline.take()
        after_step()
    raise AssertionError("the scheduler did not come to an end")


def collect_tokens(outputs: list[EngineCoreOutput]) -> Mapping[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for output in outputs:
        tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens
