"""Steps by recordings choose the tokens of steps launched kernel by kernel: prompts, mixed steps, rows that filter."""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.workers.attention.backend import AttentionBackend, PromptLens, SeenCache
from phalanx.workers.cuda_graphs import StepGraphs
from phalanx.workers.decode_step import DecodeOutput
from phalanx.workers.input_batch import InputBatch
from phalanx.workers.kernels.kv_cache import write_kv
from phalanx.workers.kernels.triton_decode_inputs import make_decode_inputs
from phalanx.workers.kv_cache_groups import make_kv_cache_groups
from phalanx.workers.memory import KVCacheShape, make_kv_caches
from phalanx.workers.model_runner import ModelRunner
from phalanx.workers.models.causal_lm import CausalLM
from phalanx.workers.prompt_step import PromptStep
from phalanx.workers.recorded_steps import (
    STARVING_FLOPS,
    RecordedSteps,
    make_decode_step,
    max_prompt_tokens,
)
from phalanx.workers.sampling_params import SamplingParams
from support.kernel_device import DEVICE
from support.model_steps import StepDriver, make_worker
from support.random_models import write_random_model
from support.tiny_models import write_tiny_llama

pytestmark = pytest.mark.skipif(
    DEVICE != "cpu", reason="there are recordings on a card: tests/gpu/test_graphs_on_gpu.py"
)

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE = 6, 128, 16
CPU = torch.device("cpu")
Output = TypeVar("Output")


class PlainGraphs(Generic[Output]):
    """As StepGraphs on a machine that records nothing: a replay computes. replayed: which sizes, in their order."""

    def __init__(self, step: Any, sizes: tuple[int, ...]) -> None:
        self.step, self.sizes = step, sizes
        self.replayed: list[int] = []

    def size_for(self, least: int) -> int | None:
        return next((size for size in self.sizes if size >= least), None)

    def replay(self, size: int) -> Output:
        self.replayed.append(size)
        result: Output = self.step.compute(size)
        return result


class PlainPagedAttention(AttentionBackend):
    """One softmax for each new token, over what its row's block table leads to. Reads no row of padding."""

    name = "plain"

    def decode(self, q: torch.Tensor, seen: SeenCache, out: torch.Tensor) -> None:
        for row in seen.kv_lens.nonzero().flatten().tolist():
            out[row] = self._attend(q[row : row + 1], seen, row)

    def prefill(self, q: torch.Tensor, seen: SeenCache, lens: PromptLens) -> torch.Tensor:
        out = torch.full_like(q, torch.nan)
        starts = lens.query_starts.tolist()
        assert lens.max_query_len >= int(lens.query_starts.diff().max())
        for row in seen.kv_lens.nonzero().flatten().tolist():
            new = slice(starts[row], starts[row + 1])
            out[new] = self._attend(q[new], seen, row)
        return out

    def _attend(self, q: torch.Tensor, seen: SeenCache, row: int) -> torch.Tensor:
        kv_len, group = int(seen.kv_lens[row]), q.shape[1] // seen.k_cache.shape[2]
        tokens = torch.arange(kv_len)
        blocks = seen.block_tables[row, tokens // BLOCK_SIZE].long()
        k, v = (
            cache[blocks, tokens % BLOCK_SIZE].repeat_interleave(group, dim=1)
            for cache in (seen.k_cache, seen.v_cache)
        )
        positions = torch.arange(kv_len - q.shape[0], kv_len)[:, None]
        is_hidden = tokens > positions
        if seen.window is not None:
            is_hidden |= tokens <= positions - seen.window
        scores = torch.einsum("qhd,khd->hqk", q, k) * seen.scale
        scores = scores.masked_fill(is_hidden, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


SLIDING = "sliding_attention"
WINDOWED = {
    "num_hidden_layers": 3, "sliding_window": 20, "layer_types": [SLIDING, "full_attention", SLIDING],
    "query_pre_attn_scalar": 24, "num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CausalLM]:
    """A model whose attention reads block tables; one has three KV cache groups, two of them with windows."""
    folder = tmp_path_factory.mktemp("tiny")
    if request.param == "llama":
        write_tiny_llama(folder)
    else:
        write_random_model(folder, request.param, **WINDOWED)
    worker = make_worker(folder, max_model_len=MAX_MODEL_LEN)
    worker.start()
    worker.model.use_attention(PlainPagedAttention())
    yield worker.model
    worker.close()


@pytest.fixture(scope="module", autouse=True)
def padding_is_not_stored() -> Iterator[None]:
    """As the card's kernel has it; plain torch knows no padding."""

    def write(
        k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        is_real = slots >= 0
        write_kv(k[is_real], v[is_real], k_cache, v_cache, slots[is_real])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.workers.layers.attention.write_kv", write)
        yield


def make_runner(model: CausalLM) -> ModelRunner:
    config = model.config
    groups = make_kv_cache_groups(config)
    shape = KVCacheShape(
        groups=groups, block_size=BLOCK_SIZE, num_kv_heads=config.num_key_value_heads, head_size=config.head_dim,
        dtype=torch.float32,
    )  # fmt: skip
    batch = InputBatch(
        max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, vocab_size=config.vocab_size,
        device=CPU, is_paged=True, num_kv_groups=len(groups),
    )  # fmt: skip
    return ModelRunner(
        model, make_kv_caches(shape, 128, CPU), batch, windows=shape.windows, device=CPU,
        on_phase=lambda name: None, is_paged=True,
    )  # fmt: skip


def use_plain_graphs(runner: ModelRunner, prompt_sizes: tuple[int, ...]) -> RecordedSteps:
    forward, rows = runner._forward, runner._batch.on_device
    common: dict[str, Any] = {
        "windows": forward._windows, "max_num_seqs": MAX_NUM_SEQS, "max_model_len": MAX_MODEL_LEN, "device": CPU,
    }  # fmt: skip
    decode = make_decode_step(
        runner._model, forward._kv_caches, rows, block_size=BLOCK_SIZE, prepare=make_decode_inputs, **common
    )
    prompts = PromptStep(
        runner._model, forward._kv_caches, rows, max_tokens=max(prompt_sizes, default=0), **common
    )
    recorded: Any = RecordedSteps(
        decode=decode,
        decode_graphs=cast("StepGraphs[DecodeOutput]", PlainGraphs(decode, (1, 2, MAX_NUM_SEQS))),
        prompts=prompts,
        prompt_graphs=cast("StepGraphs[torch.Tensor]", PlainGraphs(prompts, prompt_sizes)),
    )
    runner.use_graphs(recorded)
    return recorded


def run(
    runner: ModelRunner, requests: Sequence[tuple[list[int], SamplingParams]], chunk: int
) -> list[list[int]]:
    """All requests to their ends: one more joins with each step, and prompts come `chunk` tokens at a time."""
    num_kv_groups = runner._batch.on_device.block_tables.shape[0]
    driver = StepDriver(runner, block_size=BLOCK_SIZE, num_kv_groups=num_kv_groups)
    waiting = list(enumerate(requests))
    made: dict[str, list[int]] = {}
    while waiting or driver.held:
        if waiting:
            number, (prompt, params) = waiting.pop(0)
            driver.add(str(number), prompt, params, seed=number)
        driver.run_step(
            {name: min(chunk, len(one.token_ids) - one.num_computed) for name, one in driver.held.items()}
        )
        for name in list(driver.held):
            if len(driver.output_tokens(name)) == requests[int(name)][1].max_tokens:
                made[name] = driver.output_tokens(name)
                driver.remove(name)
    return [made[str(number)] for number in range(len(requests))]


CHOICES = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 0.9, "frequency_penalty": 0.5},
    {"temperature": 0.7, "allowed_token_ids": (4, 5, 6, 7)},
    {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 2},
)


@settings(deadline=None, max_examples=10)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from(CHOICES), st.integers(1, 6)), min_size=1, max_size=5
    ),
    chunk=st.integers(2, 40),
    prompt_sizes=st.sampled_from([(), (16,), (16, 64, 256)]),
)
def test_recorded_steps_choose_the_tokens_of_eager_ones(
    model: CausalLM,
    requests: list[tuple[int, dict[str, float], int]],
    chunk: int,
    prompt_sizes: tuple[int, ...],
) -> None:
    asked = [
        (
            [(7 * number + 3 * place) % 300 + 3 for place in range(length)],
            SamplingParams(max_tokens=most, **choice),
        )
        for number, (length, choice, most) in enumerate(requests)
    ]
    with torch.inference_mode():
        expected = run(make_runner(model), asked, chunk)
        runner = make_runner(model)
        recorded: Any = use_plain_graphs(runner, prompt_sizes)
        made = run(runner, asked, chunk)

    assert made == expected
    # A step whose prompt wants log-probabilities is not recorded.
    if prompt_sizes == (16, 64, 256) and not any("prompt_logprobs" in choice for _, choice, _ in requests):
        assert recorded.prompt_graphs.replayed
    # Of several requests one may end while the prompts of others are still computed beside it.
    if len(requests) == 1 and requests[0][2] > 1:
        assert recorded.decode_graphs.replayed


def test_every_row_that_filters_decodes_by_recordings(model: CausalLM) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.8, max_tokens=9)
    with torch.inference_mode():
        runner = make_runner(model)
        recorded: Any = use_plain_graphs(runner, (64,))
        run(runner, [([5, 6, 7], params), ([8, 9, 10, 11], params)], 40)

    # The second prompt comes while the first request decodes; the second request ends last, alone.
    assert recorded.prompt_graphs.replayed == [64, 64]
    assert recorded.decode_graphs.replayed == [2] * 7 + [1]


@pytest.mark.parametrize(("num_decode", "num_prompts"), [(0, 1), (2, 4), (1, 5), (5, 1)])
def test_a_recording_of_the_size_that_is_needed_has_room_for_the_step(
    model: CausalLM, num_decode: int, num_prompts: int
) -> None:
    prompts = use_plain_graphs(make_runner(model), (64,)).prompts

    size = PromptStep.size_needed(num_decode + 2 * num_prompts, num_prompts)

    assert size <= 64
    assert prompts._num_prompts(size) >= num_prompts
    assert prompts._num_decode_rows(size) >= num_decode


def test_what_keeps_a_gpu_busy_is_not_recorded(model: CausalLM) -> None:
    config = model.config

    assert max_prompt_tokens(config, num_ranks=1, most=100) == 100
    for num_ranks in (1, 3):
        enough = STARVING_FLOPS * num_ranks / 2 / config.num_layer_weights
        most = max_prompt_tokens(config, num_ranks=num_ranks, most=10**12)
        assert 0 <= most - enough < 64
