"""Chaos on real workers: aborts at any moment, preemptions by a tiny cache, odd chunks, one or two steps in flight.

Greedy outputs equal the undisturbed ones token for token, each token comes exactly once, and all blocks come back.
"""

import random
import time
from pathlib import Path

import pytest

from phalanx.engine.core import EngineCore
from phalanx.engine.engine_options import make_engine_config
from phalanx.engine.messages import EngineCoreRequest, FinishReason, StepOutputs
from phalanx.workers.executor import create_executor
from phalanx.workers.sampling_params import SamplingParams, StructuredOutputs
from support.step_outputs import write_out
from support.tiny_models import write_tiny_llama

DEADLINE_S = 100.0
NUM_REQUESTS = 40
CALM = {"block_size": 16, "num_blocks": 400, "max_num_seqs": 4, "max_num_batched_tokens": 256}
STORMS = [
    # tp, steps in flight, block size, blocks, sequences, tokens in a step, prefix caching
    pytest.param(1, 2, 4, 40, 8, 16, True, id="tp1-two-in-flight"),
    pytest.param(2, 2, 1, 130, 6, 7, True, id="tp2-blocks-of-one"),
    pytest.param(1, 1, 8, 20, 8, 9, False, id="tp1-one-in-flight", marks=pytest.mark.full),
    pytest.param(2, 1, 4, 40, 5, 64, True, id="tp2-one-in-flight", marks=pytest.mark.full),
    pytest.param(1, 2, 2, 46, 3, 3, False, id="tp1-chunks-of-three", marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def make_requests(seed: int) -> list[EngineCoreRequest]:
    """A third have a prompt in common, and a few have a grammar."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 380) for _ in range(33)]
    requests = []
    for number in range(NUM_REQUESTS):
        prompt = [rng.randrange(3, 380) for _ in range(rng.randrange(1, 50))]
        if rng.random() < 0.3:
            prompt = common + prompt[:10]
        spec = StructuredOutputs(regex="[a-z]{2,9}") if rng.random() < 0.2 else None
        requests.append(
            EngineCoreRequest(
                request_id=f"r{number}",
                client_index=0,
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(
                    temperature=0.0, max_tokens=rng.randrange(1, 30), structured_outputs=spec
                ),
                eos_token_ids=(2,) if spec is not None else (),
                seed=number,
                arrived_at=0.0,
                priority=rng.randrange(2),
            )
        )
    return requests


class Run:
    """One engine core on real workers, driven until all requests have ended."""

    def __init__(
        self, model: Path, requests: list[EngineCoreRequest], *, tp: int = 1, **options: object
    ) -> None:
        config = make_engine_config(
            str(model),
            tensor_parallel_size=tp,
            device="cpu",
            dtype="float32",
            num_threads=1,
            check_worker_rows=True,
            **options,
        )
        executor = create_executor(
            model=config.model,
            cache=config.cache,
            parallel=config.parallel,
            executor=config.executor,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )
        self.core = EngineCore(config, executor, executor.start())
        self.requests = requests
        self.tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        self.reasons: dict[str, FinishReason] = {}
        self.aborted: set[str] = set()
        self.before = self.after = self.core.stats()
        self._arriving_ids: set[str] = set()

    def drive(self, rng: random.Random | None) -> None:
        """rng: chooses whom to abort, and when; None: nobody."""
        deadline = time.monotonic() + DEADLINE_S
        arriving = list(self.requests)
        self._arriving_ids = {request.request_id for request in arriving}
        while arriving or self.core.num_unfinished_requests or self.core.has_work:
            assert time.monotonic() < deadline
            for _ in range(1 if rng is None else rng.randrange(4)):
                if arriving:
                    self._arriving_ids.discard(arriving[0].request_id)
                    self.core.add_request(arriving.pop(0))
            if not self.core.has_work:
                self.core.take_grammars(1.0)
            self.core.take_grammars()
            self._abort_some(rng)
            outputs = self.core.step(on_result=lambda: self._abort_some(rng))
            for output in write_out(outputs.get(0, StepOutputs())):
                assert output.request_id not in self.reasons
                assert output.request_id not in self.aborted
                self.tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.reasons[output.request_id] = output.finish_reason
        self.after = self.core.stats()

    def _abort_some(self, rng: random.Random | None) -> None:
        if rng is not None and rng.random() < 0.05:
            victim = rng.choice(self.requests).request_id
            if victim not in self.reasons and victim not in self._arriving_ids:
                self.aborted.add(victim)
            self.core.abort_requests([victim])


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    run = Run(model, make_requests(1), max_steps_in_flight=1, **CALM)
    run.drive(None)
    run.core.close(reason="done")
    assert run.after.num_preemptions == 0
    return run.tokens


@pytest.mark.parametrize(
    ("tp", "depth", "block_size", "num_blocks", "max_num_seqs", "budget", "caching"), STORMS
)
def test_a_storm_changes_no_token_and_leaks_no_block(
    model: Path,
    expected: dict[str, list[int]],
    tp: int,
    depth: int,
    block_size: int,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    caching: bool,
) -> None:
    run = Run(
        model,
        make_requests(1),
        tp=tp,
        max_steps_in_flight=depth,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    try:
        run.drive(random.Random(depth * 100 + tp))
    finally:
        run.core.close(reason="done")

    assert run.aborted, "a calm storm proves nothing"
    for request_id, tokens in run.tokens.items():
        if request_id in run.aborted:
            assert tokens == expected[request_id][: len(tokens)]
        else:
            assert tokens == expected[request_id]
            assert run.reasons[request_id] in (FinishReason.STOP, FinishReason.LENGTH)
    assert run.after.num_preemptions > 0
    assert run.after.num_free_blocks == run.before.num_free_blocks == num_blocks - 1
    assert run.after.kv_usage == 0.0
