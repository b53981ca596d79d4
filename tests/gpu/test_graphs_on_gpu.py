"""Recorded steps choose the tokens of steps whose kernels are launched one by one, and of transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

from phalanx import LLM, SamplingParams
from phalanx.workers.cuda_graphs import StepGraphs
from phalanx.workers.decode_step import DecodeOutput
from support.tiny_models import TRAINED, write_tiny_llama

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * i + j * j) % 380 + 3 for j in range(3 + 5 * i)] for i in range(11)]


@pytest.fixture(scope="module", autouse=True)
def opened_device() -> Iterator[None]:
    """Open what stays open: the driver's descriptors, also those of the first graph."""
    logging.disable_progress_bar()
    graph = torch.cuda.CUDAGraph()
    numbers = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        numbers.add_(1)
    graph.replay()
    torch.empty(1, pin_memory=True)
    torch.cuda.synchronize()
    yield
    logging.enable_progress_bar()


@pytest.fixture(scope="module", params=["random", "trained"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TRAINED if request.param == "trained" else write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def generate(folder: Path, params: list[SamplingParams], **settings: object) -> list[list[int]]:
    with LLM(
        str(folder), device="cuda", num_blocks=256, max_num_seqs=16, skip_tokenizer_init=True, **settings
    ) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_num_batched_tokens", [2048, 40])
def test_graphs_on_and_off_agree(
    folder: Path, dtype: str, max_num_batched_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = set()
    replay = StepGraphs.replay

    def watched(self: StepGraphs[Any], size: int) -> Any:
        output = replay(self, size)
        kinds.add(type(output))
        return output

    monkeypatch.setattr(StepGraphs, "replay", watched)
    params = [
        # Of different lengths, so that batches shrink; some rows leave the graphs for a filter.
        SamplingParams(
            temperature=[0.0, 0.8][index % 2], top_p=[1.0, 0.9][index == 5], seed=index, max_tokens=8 + 5 * index,
            ignore_eos=True, detokenize=False,
        )
        for index in range(len(PROMPTS))
    ]  # fmt: skip

    # All prompts in one step, or a part of one at a time beside rows that decode.
    settings = {"dtype": dtype, "max_num_batched_tokens": max_num_batched_tokens}
    recorded = generate(folder, params, **settings)
    # Steps with prompts give hidden states, those that decode tokens as well.
    assert kinds == {torch.Tensor, DecodeOutput}
    kinds.clear()

    assert recorded == generate(folder, params, enforce_eager=True, **settings)
    assert not kinds


@pytest.mark.parametrize("block_size", [16, 64])
def test_greedy_tokens_in_float32_are_those_of_transformers(folder: Path, block_size: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)

    made = generate(folder, [params] * len(PROMPTS), dtype="float32", block_size=block_size)

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().cuda()
    for prompt, output in zip(PROMPTS, made, strict=True):
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in output:
                logits = model(torch.tensor([tokens], device="cuda"), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))
        assert output == tokens[len(prompt) :]
