"""The model on a GPU against transformers on the same card, and split over ranks that share it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

from phalanx.workers.config import DeviceType, DType, ParallelConfig
from phalanx.workers.kernels.ops import product_in_parts
from phalanx.workers.layers import linear
from phalanx.workers.sampling_params import SamplingParams
from support.model_steps import RankThreads, StepDriver, make_worker
from support.tiny_models import TRAINED, write_tiny_llama

pytestmark = pytest.mark.gpu

PROMPT = [(7 * index * index + 3 * index) % 380 + 3 for index in range(45)]
ON_GPU = ParallelConfig(device=DeviceType.CUDA)


@pytest.fixture(scope="module", autouse=True)
def opened_device() -> Iterator[None]:
    """Open what stays open: the driver's descriptors. A progress bar of transformers would leave a thread."""
    logging.disable_progress_bar()
    torch.zeros(1, device="cuda")
    yield
    logging.enable_progress_bar()


@pytest.fixture(scope="module", params=["random", "trained"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TRAINED if request.param == "trained" else write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def reference_model(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval().cuda()


def test_float32_greedy_tokens_are_those_of_transformers(folder: Path) -> None:
    worker = make_worker(folder, parallel=ON_GPU, dtype=DType.FLOAT32)
    report = worker.start()
    worker.initialize_kv_cache(128)
    driver = StepDriver(worker)
    prompts = {f"r{index}": PROMPT[: 5 + 13 * index] for index in range(4)}
    for name, prompt in prompts.items():
        driver.add(name, prompt)
        driver.run_step()
    driver.generate("r3", 32)

    model = reference_model(folder, torch.float32)
    for name, prompt in prompts.items():
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(32):
                logits = model(torch.tensor([tokens], device="cuda"), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))
        assert driver.output_tokens(name)[:32] == tokens[len(prompt) :]
    assert report.device == "cuda:0"
    worker.close()


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_half_precision_logits_are_near_those_of_float32(folder: Path, dtype: DType) -> None:
    worker = make_worker(folder, parallel=ON_GPU, dtype=dtype)
    worker.start()
    worker.initialize_kv_cache(128)
    seen: list[torch.Tensor] = []
    worker._model.head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    driver = StepDriver(worker)
    driver.add("a", PROMPT)
    driver.run_step()

    with torch.inference_mode():
        exact = reference_model(folder, torch.float32)(torch.tensor([PROMPT], device="cuda")).logits[0, -1]
        half = reference_model(folder, getattr(torch, dtype.value))(torch.tensor([PROMPT], device="cuda"))

    # Not farther from the truth than twice what transformers is in the same dtype.
    allowed = 2 * float((half.logits[0, -1].float() - exact).abs().max()) + 0.02
    assert float((seen[0][0].float() - exact).abs().max()) <= allowed
    worker.close()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="for Hopper"
)
def test_sums_left_to_the_norm_give_the_logits_of_whole_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_llama(tmp_path, intermediate_size=1024)
    are_in_parts: list[bool] = []

    def watched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        parts = product_in_parts(x, weight)
        are_in_parts.append(parts is not None)
        return parts

    found: list[torch.Tensor] = []
    for function in (watched, lambda x, weight: None):
        monkeypatch.setattr(linear, "product_in_parts", function)
        worker = make_worker(folder, parallel=ON_GPU, dtype=DType.BFLOAT16, enforce_eager=True)
        worker.start()
        worker.initialize_kv_cache(128)
        worker._model.head.register_forward_hook(lambda module, inputs, output: found.append(output))
        driver = StepDriver(worker)
        driver.add("a", PROMPT)
        are_in_parts.clear()
        driver.run_step()
        assert any(are_in_parts) == (function is watched)
        worker.close()

    with torch.inference_mode():
        exact = reference_model(folder, torch.float32)(torch.tensor([PROMPT], device="cuda")).logits[0, -1]
    in_parts, whole = (float((logits[0].float() - exact).abs().max()) for logits in found)
    assert in_parts <= 2 * whole + 0.02


def test_the_profile_finds_blocks_for_the_rest_of_the_memory(folder: Path) -> None:
    worker = make_worker(folder, parallel=ON_GPU, num_blocks=None, max_num_seqs=64)

    report = worker.start()
    worker.initialize_kv_cache(report.num_kv_blocks)

    assert report.num_kv_blocks == 64 * worker.max_model_len // 16 + 1
    worker.close()


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_that_share_a_card_give_the_tokens_of_the_cpu(folder: Path, tp_size: int) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=100)
    single = make_worker(folder, parallel=ParallelConfig(device=DeviceType.CPU))
    single.start()
    single.initialize_kv_cache(128)
    on_cpu = StepDriver(single)
    on_cpu.add("greedy", PROMPT)
    on_cpu.add("random", PROMPT[:20], params)
    expected = on_cpu.generate("greedy", 16), on_cpu.output_tokens("random")

    file = os.memfd_create("rendezvous")
    parallel = ParallelConfig(tensor_parallel_size=tp_size, device=DeviceType.CUDA, share_device=True)
    ranks = RankThreads(
        [
            make_worker(
                folder,
                parallel=parallel,
                tp_rank=rank,
                rendezvous=f"/proc/self/fd/{file}",
                dtype=DType.FLOAT32,
            )
            for rank in range(tp_size)
        ]
    ).start()
    driver = StepDriver(ranks)
    driver.add("greedy", PROMPT)
    driver.add("random", PROMPT[:20], params)

    assert (driver.generate("greedy", 16), driver.output_tokens("random")) == expected
    ranks.close()
    single.close()
    os.close(file)
