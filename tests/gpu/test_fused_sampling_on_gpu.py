"""The sampler's kernels at the size of a real vocabulary: against the torch path, and inside CUDA graphs."""

import dataclasses

import numpy as np
import pytest
import torch

from phalanx.workers import sampler
from phalanx.workers.sampler import sample
from phalanx.workers.sampling_batch import SamplingBatch
from support.sampling_oracle import batch_of, hold, logits_of, random_row

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

WIDTH = 151_936
ROWS = 48


def make_logits(kind: str, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(5)
    x = torch.randn(ROWS, WIDTH, generator=generator, device="cuda") * {"flat": 1.0}.get(kind, 2.5)
    if kind == "peaked":
        x += 14.0 * (torch.rand(ROWS, WIDTH, generator=generator, device="cuda") < 6.0 / WIDTH)
    elif kind == "ties":
        x = x.round()
    elif kind == "masked":
        x[:, 1000:] = -torch.inf
        x[: ROWS // 2, 5:] = -torch.inf
    elif kind == "equal":
        x = torch.full_like(x, 3.0)
    elif kind == "overflow":
        x = torch.where(x > 9.0, torch.inf, x)
    return x.to(dtype)


def make_batch(*, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingBatch:
    index = torch.arange(ROWS, device="cuda")
    is_random = index % 7 != 3
    return SamplingBatch(
        temperatures=torch.where(is_random, 0.5 + 0.03 * index, 0.0).float(),
        top_ks=torch.where(index % 3 == 1, 0, top_k),
        top_ps=torch.where(index % 5 == 2, 1.0, top_p).float(),
        min_ps=torch.where(index % 2 == 0, 0.0, min_p).float(),
        seeds=index * 0x1234567890ABCD - 2**62,
        positions=index * 31,
        all_greedy=False,
        any_filtered=top_k > 0 or top_p < 1.0,
        any_min_p=min_p > 0.0,
        max_top_k=top_k,
        has_open_nucleus=top_p < 1.0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["flat", "normal", "peaked", "ties", "masked", "equal", "overflow"])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
        {"top_k": 5000, "top_p": 0.5},
        {"min_p": 0.05},
    ],
)
def test_the_kernels_choose_what_torch_chooses(
    dtype: torch.dtype, kind: str, filters: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, batch = make_logits(kind, dtype), make_batch(**filters)  # type: ignore[arg-type]
    batches = [dataclasses.replace(batch, positions=batch.positions + 1000 * step) for step in range(3)]
    found = [sample(logits, batch).token_ids for batch in batches]
    monkeypatch.setattr(sampler, "is_fused", lambda x: False)

    for own, batch in zip(found, batches, strict=True):
        assert torch.equal(own, sample(logits, batch).token_ids)


@pytest.mark.parametrize("filters", [None, {}, {"top_k": 50, "top_p": 0.9}])
def test_a_graph_replays_the_choice_for_other_logits_and_positions(filters: dict[str, float] | None) -> None:
    logits, batch = make_logits("normal", torch.bfloat16), make_batch(**(filters or {}))  # type: ignore[arg-type]
    if filters is None:
        batch = dataclasses.replace(batch, all_greedy=True)
    sample(logits, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = sample(logits, batch).token_ids

    for step in range(3):
        logits.copy_(logits.roll(step + 1, dims=0))
        batch.positions.add_(1)
        graph.replay()
        assert torch.equal(chosen, sample(logits, batch).token_ids)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device() -> None:
    logits = make_logits("peaked", torch.bfloat16)
    batches = [make_batch(), make_batch(top_k=50, top_p=0.9), make_batch(top_p=0.9, min_p=0.1)]
    for batch in batches:
        sample(logits, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            sample(logits, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("is_greedy", [False, True])
@pytest.mark.parametrize("filters", [{}, {"top_k": 50, "top_p": 0.9}])
def test_rows_that_ask_for_everything_choose_what_torch_chooses(
    filters: dict[str, float], is_greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(8)
    changes = {"temperature": 0.0} if is_greedy else {"temperature": 0.8, **filters}
    rows = [random_row(generator, WIDTH, min_p=0.0, logprobs=5, **changes) for _ in range(ROWS)]
    logits = logits_of(rows).to("cuda", torch.bfloat16)
    batch = batch_of(hold(rows, device="cuda"), rows)
    found = sample(logits, batch)
    monkeypatch.setattr(sampler, "is_fused", lambda x: False)
    expected = sample(logits, batch)

    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.logprobs[0].ranks, expected.logprobs[0].ranks)
    torch.testing.assert_close(found.logprobs[0].values, expected.logprobs[0].values, rtol=0, atol=1e-5)
