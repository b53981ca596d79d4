"""Triton's kernels of the sampler against the torch path: the same tokens, the same thresholds, bit by bit.

They run in Triton's interpreter where there is no card.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from phalanx.workers import fused_sampling, sampler
from phalanx.workers.config import LogprobsMode
from phalanx.workers.kernels import triton_filters, triton_logprobs
from phalanx.workers.kernels.triton_draw import PIECE, choose_tokens, draw
from phalanx.workers.kernels.triton_edits import edit
from phalanx.workers.kernels.triton_filters import find_thresholds
from phalanx.workers.kernels.triton_noise import ESTIMATE_ERROR, estimate_gumbel, gumbel
from phalanx.workers.kernels.triton_nucleus import CLOSED, find_edges
from phalanx.workers.kernels.triton_rows import LogitRows, materialise
from phalanx.workers.logit_processors import LARGEST, mask_grammar, mask_padding, pack_masks, process
from phalanx.workers.logprobs import find_parts
from phalanx.workers.noise import gumbel_rows
from phalanx.workers.sampler import Sampled
from phalanx.workers.sampling_batch import LogprobGroup, Penalties, SamplingBatch, TokenMasks, TokenValues
from phalanx.workers.sampling_filters import thresholds
from phalanx.workers.sampling_params import SamplingParams
from phalanx.workers.vocab_columns import WHOLE
from support.kernel_device import DEVICE, HAS_CARD, NARROW
from support.sampling_oracle import Row, batch_of, hold, logits_of, random_row

WITHOUT_SHRINKING = settings(
    max_examples=200 if HAS_CARD else 8, deadline=None, phases=[Phase.explicit, Phase.generate]
)
NUM_IDS = 5000
KINDS = st.sampled_from(["normal", "peaked", "ties", "equal", "one-hot", "masked", "nothing", "huge"])


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler takes the kernels, on a CPU as well."""
    monkeypatch.setattr(sampler, "is_fused", lambda x: True)
    monkeypatch.setattr(sampler, "fused_sampling", fused_sampling, raising=False)


class Alone:
    """A rank whose part of the columns is all that there is."""

    def __init__(self, first_id: int) -> None:
        self.first_id = first_id

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Gathered:
    """A rank's part of the columns, and what all ranks would bring together."""

    def __init__(self, first_id: int, everything: torch.Tensor) -> None:
        self.first_id = first_id
        self._everything = everything

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        at = 0 if self.first_id == 0 else x.shape[-1]
        assert torch.equal(x, self._everything[:, at : at + x.shape[-1]])
        return self._everything


def make_row(generator: np.random.Generator, kind: str, width: int) -> np.ndarray:
    x = generator.normal(size=width) * 2.0
    if kind == "peaked":
        x = x * 0.5 + 12.0 * (generator.random(width) < 3.0 / width)
    elif kind == "ties":
        x = x.round()
    elif kind == "equal":
        x[:] = -1.5
    elif kind == "one-hot":
        x[:] = -np.inf
        x[generator.integers(width)] = 0.25
    elif kind == "masked":
        x[generator.random(width) < 0.7] = -np.inf
        x[generator.integers(width)] = 1.0
    elif kind == "nothing":
        x[:] = -np.inf
    elif kind == "huge":
        x[generator.random(width) < 0.2] = np.inf
        x[generator.random(width) < 0.2] = -1e25
    return x


def make_rows(seed: int, kinds: list[str], width: int) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    rows = np.stack([make_row(generator, kind, width) for kind in kinds])
    return torch.from_numpy(rows.astype(np.float32))


def make_batch(seed: int, num_rows: int, width: int, max_top_k: int) -> SamplingBatch:
    generator = np.random.default_rng(seed)
    temperatures = torch.from_numpy(generator.choice([0.0, 0.01, 0.6, 1.0, 1.7], num_rows).astype(np.float32))
    top_ks = torch.from_numpy(generator.choice([0, 1, 3, 60, max_top_k, width - 1], num_rows))
    top_ks[(top_ks >= width) | (top_ks > max_top_k)] = 0
    top_ps = torch.from_numpy(generator.choice([1.0, 0.999, 0.9, 0.5, 1e-9], num_rows).astype(np.float32))
    min_ps = torch.from_numpy(generator.choice([0.0, 0.0, 0.003, 0.4, 1.0], num_rows).astype(np.float32))
    is_random = temperatures > 0
    return SamplingBatch(
        temperatures=temperatures,
        top_ks=top_ks,
        top_ps=top_ps,
        min_ps=min_ps,
        seeds=torch.from_numpy(generator.integers(-(2**63), 2**63 - 1, num_rows)),
        positions=torch.from_numpy(generator.integers(0, 2**20, num_rows)),
        all_greedy=False,
        any_filtered=True,
        any_min_p=True,
        max_top_k=int((top_ks * is_random).max()),
        has_open_nucleus=bool((is_random & (top_ps < 1.0) & (top_ks == 0)).any()),
    )


def on_device(batch: SamplingBatch) -> SamplingBatch:
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    moved = {name: value.to(DEVICE) for name, value in values.items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(batch, **moved)


def scaled_of(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    return fused_sampling.temper(logits.float().clamp(max=1e30), batch)


@triton.jit
def _noise_kernel(words_ptr, estimate_ptr, exact_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    words = tl.load(words_ptr + at).to(tl.uint32)
    tl.store(estimate_ptr + at, estimate_gumbel(words))
    tl.store(exact_ptr + at, gumbel(words))


def test_the_estimate_of_the_noise_errs_by_less_than_it_says() -> None:
    edges = torch.cat([torch.arange(4096), 2**23 + torch.arange(-2048, 2048), 2**24 - 1 - torch.arange(4096)])
    cells = torch.cat([edges, torch.randint(0, 2**24, (4096 * 13,))]).to(DEVICE)
    estimate = torch.empty(cells.shape, dtype=torch.float32, device=DEVICE)
    exact = torch.empty(cells.shape, dtype=torch.float64, device=DEVICE)

    _noise_kernel[(cells.numel() // 4096,)](cells << 8, estimate, exact, SIZE=4096, enable_fp_fusion=False)

    assert (estimate.double() - exact).abs().max() < ESTIMATE_ERROR / 2


@WITHOUT_SHRINKING
@given(
    seed=st.integers(0, 10**6),
    kinds=st.lists(KINDS, min_size=1, max_size=4),
    width=st.sampled_from([1, 3, 64, 1000, PIECE, PIECE + 1, 3 * PIECE - 5]),
    dtype=st.sampled_from([torch.float32, NARROW]),
    first_id=st.sampled_from([0, 4, 128]),
)
def test_a_draw_is_the_references_score_and_lowest_id(
    seed: int, kinds: list[str], width: int, dtype: torch.dtype, first_id: int
) -> None:
    logits = make_rows(seed, kinds, width).to(dtype)
    batch = make_batch(seed, len(kinds), width, width)
    scaled = scaled_of(logits, batch)
    noise = gumbel_rows(batch.seeds, batch.positions, width, first_id=first_id)
    is_random = (batch.temperatures > 0).unsqueeze(-1)
    expected = torch.where(is_random, scaled.double() + noise, scaled.double())

    scores, token_ids = choose_tokens(
        LogitRows(logits=logits.to(DEVICE), first_id=first_id),
        temperatures=batch.temperatures.to(DEVICE),
        seeds=batch.seeds.to(DEVICE),
        positions=batch.positions.to(DEVICE),
    )

    assert torch.equal(scores.cpu(), expected.amax(dim=-1))
    assert torch.equal(token_ids.cpu(), expected.argmax(dim=-1) + first_id)
    _, greedy = choose_tokens(LogitRows(logits=logits.to(DEVICE), first_id=first_id))
    assert torch.equal(greedy.cpu(), logits.float().argmax(dim=-1) + first_id)


def test_rows_of_a_persistent_state_are_drawn_within_their_vocabulary_and_noted() -> None:
    width, rows = 2500, torch.tensor([4, 0, 7, 2])
    logits = make_rows(11, ["normal", "ties", "equal", "peaked"], width).to(NARROW)
    state = make_batch(11, 8, width, width)
    limits = torch.tensor([width, 1, width, 1, 700, 1, 1, width + 9])
    last_tokens = torch.full((8,), -1, device=DEVICE)
    positions = torch.tensor([0, 9, 10**6, 3])
    x = logits.float() / torch.where(state.temperatures > 0, state.temperatures, 1.0)[rows, None]
    noise = gumbel_rows(state.seeds[rows], positions, width) * (state.temperatures > 0)[rows, None]
    is_token = torch.arange(width) < limits[rows, None]
    expected = torch.where(is_token, x.double() + noise, -torch.inf).argmax(dim=-1)

    values = (rows, positions, state.temperatures, state.seeds, limits)
    tokens = draw(logits.to(DEVICE), *(value.to(DEVICE) for value in values), last_tokens)

    assert torch.equal(tokens.cpu(), expected)
    assert torch.equal(last_tokens[rows.to(DEVICE)], tokens)
    assert (last_tokens == -1).sum() == 4


@WITHOUT_SHRINKING
@given(
    seed=st.integers(0, 10**6),
    kinds=st.lists(KINDS.filter(lambda kind: kind != "huge"), min_size=1, max_size=5),
    width=st.sampled_from([1, 3, 64, 1000, 5000]),
    max_top_k=st.sampled_from([20, 300, 10**6]),
    num_chosen=st.sampled_from([4, 16, 64, 256]),
)
def test_thresholds_keep_what_the_reference_keeps(
    seed: int, kinds: list[str], width: int, max_top_k: int, num_chosen: int
) -> None:
    logits = make_rows(seed, kinds, width)
    batch = make_batch(seed, len(kinds), width, min(max_top_k, width - 1))
    scaled = scaled_of(logits, batch)
    expected = thresholds(scaled, batch, WHOLE, scaled.amax(dim=-1))

    with pytest.MonkeyPatch.context() as patch:
        # With few groups, short rows too take the way of those that are flat.
        patch.setattr(triton_filters, "FEW_CHOSEN", min(num_chosen, 64))
        patch.setattr(triton_filters, "MANY_CHOSEN", num_chosen)
        kept, group_best = find_thresholds(
            LogitRows(logits=logits.to(DEVICE)),
            temperatures=batch.temperatures.to(DEVICE),
            top_ks=batch.top_ks.to(DEVICE),
            top_ps=batch.top_ps.to(DEVICE),
            min_ps=batch.min_ps.to(DEVICE),
            max_top_k=batch.max_top_k,
            has_open_nucleus=batch.has_open_nucleus,
        )

    is_kept = scaled >= kept.cpu().unsqueeze(-1)
    assert torch.equal(is_kept, scaled >= expected.unsqueeze(-1))
    padded = torch.nn.functional.pad(scaled, (0, -width % 64), value=-torch.inf)
    assert torch.equal(group_best.cpu(), padded.unflatten(-1, (-1, 64)).amax(dim=-1))


@pytest.mark.parametrize("spread", [0.0, 1e-5, 0.3, 3.0])
def test_the_edge_of_a_flat_nucleus_is_found_in_the_passes_over_the_row(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 1500, generator=generator) * spread + torch.tensor([[0.0], [12.0], [-30.0]])
    logits[1, ::3] = -torch.inf
    logits[2] = (logits[2] * 4).round() / 4
    top_ps = torch.tensor([0.9, 0.999999, 0.5])
    batch = dataclasses.replace(
        make_batch(0, 3, 1500, 1), temperatures=torch.tensor([0.6, 1.0, 1.7]), top_ks=torch.zeros(3).long(),
        top_ps=top_ps, min_ps=torch.zeros(3), max_top_k=0, has_open_nucleus=True,
    )  # fmt: skip
    scaled = scaled_of(logits, batch)
    states = []

    def watched(*arguments: object) -> None:
        find_edges(*arguments)
        states.append(arguments[3])

    monkeypatch.setattr(triton_filters, "MANY_CHOSEN", 4)
    monkeypatch.setattr(triton_filters, "find_edges", watched)
    given = {name: getattr(on_device(batch), name) for name in ("temperatures", "top_ks", "top_ps", "min_ps")}
    kept, _ = find_thresholds(
        LogitRows(logits=logits.to(DEVICE)), **given, max_top_k=0, has_open_nucleus=True
    )

    expected = thresholds(scaled, batch, WHOLE, scaled.amax(dim=-1))
    assert torch.equal(scaled >= kept.cpu().unsqueeze(-1), scaled >= expected.unsqueeze(-1))
    (is_open,) = states
    assert is_open.tolist() == [CLOSED] * 3


def sample_rows(rows: list[Row], mode: LogprobsMode) -> Sampled:
    held = hold(rows, mode=mode, device=DEVICE)
    return sampler.sample(logits_of(rows).to(DEVICE), batch_of(held, rows))


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    ("probabilities", "params", "kept"),
    [
        ([0.5, 0.3, 0.1, 0.1], {"top_p": 0.8}, [0, 1]),
        ([0.3, 0.1, 0.1, 0.5], {"top_p": 0.8}, [0, 3]),
        ([0.25, 0.25, 0.25, 0.25], {"top_p": 0.5}, [0, 1, 2, 3]),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 1e-9}, [0]),
        ([0.4, 0.2, 0.2, 0.2], {"top_k": 2}, [0, 1, 2, 3]),
        ([0.4, 0.3, 0.2, 0.1], {"top_k": 3, "min_p": 0.6, "top_p": 0.99}, [0, 1]),
    ],
)
def test_rows_at_an_edge(probabilities: list[float], params: dict[str, float], kept: list[int]) -> None:
    row = Row(
        logits=np.log(probabilities).astype(np.float32),
        params=SamplingParams(max_tokens=None, logprobs=-1, **params),  # type: ignore[arg-type]
    )

    (table,) = sample_rows([row], LogprobsMode.PROCESSED_LOGPROBS).logprobs

    found = table.token_ids[0, 1:][table.values[0, 1:] > -torch.inf]
    assert sorted(found.tolist()) == kept


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("mode", LogprobsMode)
@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}])
def test_batches_of_anything_are_as_on_the_torch_path(
    mode: LogprobsMode, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(len(mode.value))
    rows = [random_row(generator, 70, logprobs=-1, **changes) for _ in range(6)]

    found = sample_rows(rows, mode)
    monkeypatch.setattr(sampler, "is_fused", lambda x: False)
    expected = sample_rows(rows, mode)

    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.logprobs[0].token_ids, expected.logprobs[0].token_ids)
    assert torch.equal(found.logprobs[0].values, expected.logprobs[0].values)


def masks(generator: torch.Generator, num_rows: int, num_tokens: int, share: float) -> TokenMasks:
    """For some rows, of tokens of which few or many may be chosen."""
    index = torch.randperm(num_rows, generator=generator)[: max(1, num_rows - 1)]
    allowed = torch.rand(len(index), num_tokens, generator=generator) < share
    return TokenMasks(row_index=index, words=torch.from_numpy(pack_masks(allowed.numpy())))


def single_values(generator: torch.Generator, num_rows: int, count: int, values: list[float]) -> TokenValues:
    """Of tokens of some rows, none twice."""
    index = torch.randperm(num_rows, generator=generator)[: max(1, num_rows - 1)]
    place = torch.arange(len(index)).repeat_interleave(count)
    token_ids = torch.cat([torch.randperm(NUM_IDS, generator=generator)[:count] for _ in index])
    chosen = torch.tensor(values)[torch.randint(0, len(values), (len(token_ids),), generator=generator)]
    return TokenValues(row_index=index, place=place, token_ids=token_ids, values=chosen)


def penalties_of(generator: torch.Generator, num_rows: int, repetition: float, weight: float) -> Penalties:
    index = torch.randperm(num_rows, generator=generator)[: max(1, num_rows - 1)]
    counts = torch.randint(-5, 4, (6, NUM_IDS), generator=generator, dtype=torch.int32).clamp(min=0)
    is_held = (counts > 0) | (torch.rand(6, NUM_IDS, generator=generator) < 0.2)
    values = torch.linspace(0.5, 1.0, num_rows).unsqueeze(-1)[: len(index)]
    return Penalties(
        row_index=index,
        slots=torch.randint(0, 6, (len(index),), generator=generator),
        repetition=values * repetition,
        frequency=values * weight,
        presence=-values * weight,
        held=torch.from_numpy(pack_masks(is_held.numpy())),
        counts=counts,
    )


def moved(part: TokenMasks | TokenValues | Penalties) -> TokenMasks | TokenValues | Penalties:
    return type(part)(**{f.name: getattr(part, f.name).to(DEVICE) for f in dataclasses.fields(part)})


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy tells of infinity, in the interpreter
@WITHOUT_SHRINKING
@given(
    seed=st.integers(0, 10**6),
    kinds=st.lists(KINDS, min_size=1, max_size=4),
    width=st.sampled_from([1, 60, NUM_IDS - 64]),
    dtype=st.sampled_from([torch.float32, NARROW]),
    first_id=st.sampled_from([0, 64]),
    share=st.sampled_from([0.0, 0.001, 0.05, 0.9]),
    num_values=st.sampled_from([1, 30, 700]),
    repetition=st.sampled_from([1e-30, 0.5, 1.0, 1.3, 1e30]),
    weight=st.sampled_from([0.0, 0.7, -2.0]),
    skipped=st.sets(st.sampled_from(["grammar", "allowed", "bad_words", "bias", "held_back", "penalties"])),
)
def test_rows_read_by_kernels_are_as_the_stages_in_torch_write_them(
    seed: int, kinds: list[str], width: int, dtype: torch.dtype, first_id: int, share: float, num_values: int,
    repetition: float, weight: float, skipped: set[str],
) -> None:  # fmt: skip
    logits, size = make_rows(seed, kinds, width).to(dtype), len(kinds)
    generator = torch.Generator().manual_seed(seed)
    stages = {
        "grammar": masks(generator, size, NUM_IDS, share),
        "allowed": masks(generator, size, NUM_IDS, 0.5),
        "bad_words": single_values(generator, size, num_values, [0.0, -torch.inf]),
        "bias": single_values(generator, size, num_values, [100.0, -100.0, 0.3]),
        "held_back": single_values(generator, size, num_values, [-torch.inf]),
        "penalties": penalties_of(generator, size, repetition, weight),
    }
    stages = {name: None if name in skipped else stage for name, stage in stages.items()}
    limits = first_id + torch.randint(1, width + 1, (size,), generator=generator)
    batch = dataclasses.replace(make_batch(seed, size, width, 1), vocab_limits=limits, **stages)
    # Part of the rows, or as good as the whole of them.
    columns = Alone(first_id) if first_id else WHOLE
    expected = logits.float().clamp(max=LARGEST)
    mask_padding(expected, limits, int(limits.min()), first_id)
    if batch.grammar is not None:
        mask_grammar(expected, batch.grammar, columns)
    raw = expected.clone()
    process(expected, batch, columns)

    on_card = {name: None if stage is None else moved(stage) for name, stage in stages.items()}
    group = LogprobGroup(row_index=torch.arange(1), places=[0], num_top=1, wanted=[1])
    seen = LogitRows(logits=logits.to(DEVICE), first_id=first_id, limits=limits.to(DEVICE))
    asked = dataclasses.replace(on_device(batch), logprobs=(group,), **on_card)
    edits, raw_edits = edit(seen, asked, columns)

    assert torch.equal(materialise(dataclasses.replace(seen, edits=edits)).cpu(), expected)
    assert torch.equal(materialise(dataclasses.replace(seen, edits=raw_edits)).cpu(), raw)


@WITHOUT_SHRINKING
@given(
    seed=st.integers(0, 10**6),
    kinds=st.lists(KINDS.filter(lambda kind: kind != "nothing"), min_size=1, max_size=4),
    width=st.sampled_from([8, 64, 1000, PIECE + 1, 5000]),
    dtype=st.sampled_from([torch.float32, NARROW]),
    first_id=st.sampled_from([0, 64]),
    num_top=st.sampled_from([0, 1, 5, 20]),
    is_raw=st.booleans(),
)
@example(
    seed=364,
    kinds=["huge", "one-hot", "peaked"],
    width=1000,
    dtype=torch.float32,
    first_id=64,
    num_top=0,
    is_raw=False,
)
def test_parts_of_logprobs_are_those_of_torch(
    seed: int, kinds: list[str], width: int, dtype: torch.dtype, first_id: int, num_top: int, is_raw: bool
) -> None:
    logits = make_rows(seed, kinds, width).to(dtype)
    batch = make_batch(seed, len(kinds), width, width)
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(len(kinds), generator=generator)
    token_ids = first_id + torch.randint(-3, width + 3, (len(kinds),), generator=generator)
    kept = torch.where(batch.temperatures > 0, 0.25, -torch.inf)
    shown = logits.float().clamp(max=LARGEST)
    if not is_raw:
        shown = scaled_of(logits, batch)
        shown.masked_fill_(shown < kept.unsqueeze(-1), -torch.inf)
    shown = shown[index]
    places = token_ids - first_id
    own = shown.gather(-1, places.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
    own = torch.where((places >= 0) & (places < width), own, -torch.inf)
    expected = find_parts(shown, own, num_top, first_id=first_id)
    _, order = shown.sort(dim=-1, descending=True, stable=True)

    rows = LogitRows(logits=logits.to(DEVICE), first_id=first_id)
    filters = {} if is_raw else {"temperatures": batch.temperatures.to(DEVICE), "kept": kept.to(DEVICE)}
    found_own = triton_logprobs.find_own(rows, index.to(DEVICE), token_ids.to(DEVICE), **filters)
    found = triton_logprobs.find_parts(rows, index.to(DEVICE), found_own, num_top, **filters)

    assert torch.equal(found_own.cpu(), own)
    assert torch.equal(found.largest.cpu(), expected.largest)
    torch.testing.assert_close(found.mass.cpu(), expected.mass, rtol=1e-6, atol=0)
    assert torch.equal(found.num_larger.cpu(), expected.num_larger)
    assert torch.equal(found.values.cpu(), expected.values)
    assert torch.equal(found.token_ids.cpu(), order[:, :num_top] + first_id)


@pytest.mark.usefixtures("with_kernels")
def test_ranks_with_a_part_each_find_the_token_of_the_whole_row() -> None:
    logits = make_rows(3, ["normal", "ties", "equal", "peaked", "one-hot", "huge"], 320)
    batch = make_batch(3, 6, 320, 40)
    batch = dataclasses.replace(batch, top_ps=torch.ones(6), any_min_p=False, any_filtered=False)
    batch = on_device(batch)
    whole, _ = fused_sampling.choose(LogitRows(logits=logits.to(DEVICE)), batch, WHOLE)

    edges = [0, 128, 320]
    parts = []
    for low, high in itertools.pairwise(edges):
        scores, token_ids = choose_tokens(
            LogitRows(logits=logits[:, low:high].to(DEVICE), first_id=low), temperatures=batch.temperatures,
            seeds=batch.seeds, positions=batch.positions,
        )  # fmt: skip
        parts.append(torch.stack([scores, token_ids.double()], dim=-1))
    for own in range(2):
        columns = Gathered(edges[own], torch.cat(parts, dim=-1))
        part = LogitRows(logits=logits[:, edges[own] : edges[own + 1]].to(DEVICE), first_id=edges[own])
        token_ids, _ = fused_sampling.choose(part, batch, columns)
        assert torch.equal(token_ids, whole)
