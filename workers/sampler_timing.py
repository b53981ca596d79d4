"""What the choice of tokens costs on this device, by rows and by what they ask for; beside other ways to choose.

Called by: `cluster-bench sampler`, in the process of the benchmark. On a GPU a time is that of a CUDA graph of several
choices over different logits, so that neither launches nor a warm cache are in it; what cannot be captured is launched
as it comes, and says so. Logits are bfloat16 on a GPU and float32 on a CPU, as models give them.
"""

import inspect
import itertools
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np
import torch

from .messages import NewRequest
from .sampler import sample
from .sampling_batch import SamplingBatch
from .sampling_params import SamplingParams
from .sampling_rows import SamplingRows

OURS, TORCH, FLASHINFER = "phalanx", "torch sort", "flashinfer"
NUM_WARM_UP = 2
GRAPH_BYTES = 400 << 20
"""Logits of a graph: many times the cache of a GPU."""
MAX_IN_GRAPH = 12

Choice = Callable[[torch.Tensor], object]


class SamplerCase(msgspec.Struct, frozen=True, kw_only=True):
    """What all rows of a batch ask for.

    has_edits: half of the tokens are allowed, some have a bias, some are banned
    spread:    standard deviation of the logits; peaked: a few stand out
    """

    name: str
    temperature: float = 0.6
    top_k: int = 0
    top_p: float = 1.0
    penalty: float = 0.0
    logprobs: int | None = None
    has_edits: bool = False
    spread: float = 2.0
    is_peaked: bool = True


CASES = (
    SamplerCase(name="greedy", temperature=0.0),
    SamplerCase(name="temperature", is_peaked=False),
    SamplerCase(name="top-k 50, top-p 0.9", top_k=50, top_p=0.9),
    SamplerCase(name="top-k 50, top-p 0.9, flat", top_k=50, top_p=0.9, spread=0.3, is_peaked=False),
    SamplerCase(name="top-p 0.9", top_p=0.9),
    SamplerCase(name="top-p 0.9, flat", top_p=0.9, spread=0.3, is_peaked=False),
    SamplerCase(name="penalties", penalty=0.5),
    SamplerCase(name="masks, bias, bad words", has_edits=True),
    SamplerCase(name="logprobs 5", logprobs=5),
)


class SamplerTime(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of one choice for all rows: one number for each run.

    is_graph: inside a CUDA graph; problem: why there is no time
    """

    case: str
    system: str
    num_rows: int
    vocab_size: int
    us: list[float]
    is_graph: bool = False
    problem: str = ""


def pick_device(name: str | None) -> torch.device:
    """Find the device to measure; None: a GPU where there is one."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def time_sampler(
    *, rows: tuple[int, ...], vocab_size: int, num_runs: int, device: torch.device, with_peers: bool = True
) -> Iterator[SamplerTime]:
    """Time every case at every number of rows, each as it is done."""
    for case, num_rows in itertools.product(CASES, rows):
        choices: dict[str, Choice] = {OURS: _ours(case, num_rows, vocab_size, device)}
        if with_peers:
            choices |= _peers(case, device)
        buffers = _make_logits(case, num_rows, vocab_size, device)
        for system, choose in choices.items():
            try:
                us, is_graph = _time(choose, buffers, num_runs, device)
                problem = ""
            except torch.OutOfMemoryError as error:
                us, is_graph, problem = [], False, str(error).splitlines()[0]
            yield SamplerTime(
                case=case.name, system=system, num_rows=num_rows, vocab_size=vocab_size, us=us,
                is_graph=is_graph, problem=problem,
            )  # fmt: skip


def _make_logits(
    case: SamplerCase, num_rows: int, vocab_size: int, device: torch.device
) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    count = 1
    if device.type == "cuda":
        count = max(2, min(MAX_IN_GRAPH, GRAPH_BYTES // (num_rows * vocab_size * dtype.itemsize)))
    generator = torch.Generator(device).manual_seed(0)
    buffers = []
    for _ in range(count):
        x = torch.randn(num_rows, vocab_size, generator=generator, device=device) * case.spread
        if case.is_peaked:
            # A head of 64 tokens that falls off, as text has it: most of the mass is there.
            ids = torch.randint(0, vocab_size, (num_rows, 64), generator=generator, device=device)
            head = 20.0 - 1.5 * torch.arange(1, 65, device=device).float().log2()
            x.scatter_(1, ids, head.expand(num_rows, 64))
        buffers.append(x.to(dtype))
    return buffers


def _ours(case: SamplerCase, num_rows: int, vocab_size: int, device: torch.device) -> Choice:
    held = SamplingRows(max_num_seqs=num_rows, vocab_size=vocab_size, device=device)
    edits: dict[str, Any] = {
        "allowed_token_ids": tuple(range(0, vocab_size, 2)),
        "logit_bias": dict.fromkeys(range(0, 40, 2), 1.5),
        "bad_words_token_ids": tuple((token_id,) for token_id in range(100, 140, 2)),
    }
    params = SamplingParams(
        temperature=case.temperature,
        top_k=case.top_k,
        top_p=case.top_p,
        frequency_penalty=case.penalty,
        presence_penalty=case.penalty,
        logprobs=case.logprobs,
        max_tokens=None,
        **(edits if case.has_edits else {}),
    )
    for row in range(num_rows):
        token_ids = [(row * 7919 + at * 104729) % vocab_size for at in range(512)]
        held.add(
            row,
            NewRequest(
                request_id=str(row),
                token_ids=token_ids,
                num_prompt_tokens=256,
                num_computed_tokens=0,
                block_ids=[],
                sampling_params=params,
                seed=row,
            ),
        )
    batch: SamplingBatch = held.batch(np.arange(num_rows), np.full(num_rows, 256))
    return lambda logits: sample(logits, batch)


def _peers(case: SamplerCase, device: torch.device) -> dict[str, Choice]:
    """The same choice otherwise, where others have it."""
    if case.penalty or case.has_edits or case.logprobs is not None:
        return {}
    found: dict[str, Choice] = {TORCH: _torch_sort(case)}
    if device.type == "cuda" and case.temperature > 0.0 and find_spec("flashinfer") is not None:
        found[FLASHINFER] = _flashinfer(case)
    return found


def _torch_sort(case: SamplerCase) -> Choice:
    def choose(logits: torch.Tensor) -> torch.Tensor:
        if case.temperature == 0.0:
            return logits.argmax(dim=-1)
        x = logits.float() / case.temperature
        if not case.top_k and case.top_p == 1.0:
            return torch.multinomial(x.softmax(dim=-1), 1)
        values, ids = x.sort(dim=-1, descending=True)
        if case.top_k:
            values[:, case.top_k :] = -torch.inf
        mass = values.softmax(dim=-1)
        mass = mass.masked_fill(mass.cumsum(dim=-1) - mass >= case.top_p, 0.0)
        return ids.gather(-1, torch.multinomial(mass, 1))

    return choose


def _flashinfer(case: SamplerCase) -> Choice:
    # Not a dependency: measured where somebody has installed it.
    from flashinfer import sampling

    # Without them it reads a generator's state on the host, which no graph can hold; older releases must.
    has_seeds = "seed" in inspect.signature(sampling.sampling_from_probs).parameters
    seeds = {"seed": 0, "offset": 0} if has_seeds else {}

    def choose(logits: torch.Tensor) -> object:
        mass = sampling.softmax(logits.float(), temperature=case.temperature)
        if case.top_k:
            return sampling.top_k_top_p_sampling_from_probs(mass, case.top_k, case.top_p, **seeds)
        if case.top_p < 1.0:
            return sampling.top_p_sampling_from_probs(mass, case.top_p, **seeds)
        return sampling.sampling_from_probs(mass, **seeds)

    return choose


def _time(
    choose: Choice, buffers: list[torch.Tensor], num_runs: int, device: torch.device
) -> tuple[list[float], bool]:
    """Microseconds of one choice, run by run; and whether it was inside a graph."""

    def choose_all() -> None:
        for logits in buffers:
            choose(logits)

    with torch.inference_mode():
        for _ in range(NUM_WARM_UP):
            choose_all()
        if device.type != "cuda":
            return [_host_s(choose_all) * 1e6 / len(buffers) for _ in range(num_runs)], False
        torch.cuda.synchronize(device)
        replay, is_graph = choose_all, False
        if _can_be_recorded(choose, buffers[0]):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                choose_all()
            replay, is_graph = graph.replay, True
            replay()
        return [_device_s(replay) * 1e6 / len(buffers) for _ in range(num_runs)], is_graph


def _can_be_recorded(choose: Choice, logits: torch.Tensor) -> bool:
    """False when it waits for the device, or needs a state of the host, neither of which a graph can hold."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        choose(logits)
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            choose(logits)
    except RuntimeError:
        return False
    return True


def _host_s(run: Callable[[], None]) -> float:
    began_at = time.perf_counter()
    run()
    return time.perf_counter() - began_at


def _device_s(run: Callable[[], None]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
