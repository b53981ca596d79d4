"""DecodeStep and its parts: rows in any place, new blocks, tokens that only the device has; against eager steps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.workers.cuda_graphs import decode_sizes, prompt_sizes
from phalanx.workers.decode_step import DecodeStep
from phalanx.workers.device_rows import DeviceRows
from phalanx.workers.forward_context import ForwardContext, StepRows, build_forward_context
from phalanx.workers.kernels import triton_decode_inputs
from phalanx.workers.kernels.decode_inputs import DecodeInputs, make_decode_inputs
from phalanx.workers.kernels.triton_best_rank import best_rank
from phalanx.workers.kernels.triton_draw import draw, draw_part
from phalanx.workers.noise import gumbel_rows
from phalanx.workers.sampling_params import SamplingParams
from support.kernel_device import DEVICE
from support.model_steps import GREEDY, StepDriver, make_worker
from support.tiny_models import write_tiny_llama

BLOCK_SIZE = 4
ROW_NUMBERS = st.permutations(range(7))


@settings(deadline=None)
@given(st.integers(1, 700))
def test_graph_sizes_ascend_and_hold_every_batch(max_num_seqs: int) -> None:
    sizes = decode_sizes(max_num_seqs)

    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    for num_rows in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= num_rows)
        assert size - num_rows < 16
        assert num_rows > 8 or size < 2 * num_rows or size == 1


@settings(deadline=None)
@given(st.integers(1, 20000))
def test_sizes_for_prompts_ascend_and_waste_no_more_than_half(max_tokens: int) -> None:
    sizes = prompt_sizes(max_tokens)

    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == max_tokens
    for num_tokens in (max_tokens, max_tokens // 2 + 1, max_tokens // 3 + 1):
        size = next(size for size in sizes if size >= num_tokens)
        assert size <= max(16, 2 * num_tokens)
        assert size <= 256 or size < 1.5 * num_tokens


def test_no_sizes_for_no_prompts() -> None:
    assert prompt_sizes(0) == ()


@settings(deadline=None, max_examples=40)
@given(
    rows=ROW_NUMBERS,
    num_groups=st.integers(1, 3),
    num_real=st.integers(1, 6),
    block_size=st.sampled_from([1, 4, 16]),
    max_blocks=st.sampled_from([1, 5, 300]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_kernel_makes_the_inputs_that_plain_torch_makes(
    rows: list[int], num_groups: int, num_real: int, block_size: int, max_blocks: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def some(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator).to(DEVICE)

    n = min(num_real + 1, len(rows))
    row_index = torch.tensor(rows[:n], device=DEVICE)
    positions = some(block_size * max_blocks, n)
    positions[num_real:] = -1
    new_blocks = torch.where(some(2, num_groups, n) == 1, some(1000, num_groups, n), -1)
    new_blocks[:, num_real:] = -1
    last_tokens, table = some(1000, 7), some(1000, num_groups, 7, max_blocks).int()
    tables = [table.clone(), table.clone()]

    expected, made = (
        make(row_index, positions, new_blocks, last_tokens, one, block_size=block_size)
        for make, one in zip(
            (make_decode_inputs, triton_decode_inputs.make_decode_inputs), tables, strict=True
        )
    )

    for name in ("token_ids", "positions", "kv_lens", "slot_mappings"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name
    for row, kv_len in enumerate(expected.kv_lens.tolist()):
        used = -(-kv_len // block_size)
        assert torch.equal(made.block_tables[:, row, :used], expected.block_tables[:, row, :used])
    assert torch.equal(*tables)


@pytest.mark.parametrize("vocab_size", [97, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_draws_what_the_noise_says(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn((6, vocab_size), generator=generator).to(dtype)
    logits[0, 10] = logits[0, 20] = 9.0
    rows = torch.tensor([0, 3, 5, 1, 2, 7])
    positions = torch.tensor([0, 5, 1, 499, 3, 2])
    temperatures = torch.tensor([0.0, 0.6, 1.0, 2.0, 0.0, 0.3, 0.0, 0.05])
    seeds = torch.tensor([5, 2**62 + 3, -7, 8, 9, 10, 11, 12])
    limits = torch.full((8,), vocab_size)
    limits[2] = 50
    last_tokens = torch.full((8,), -1)

    tensors = [one.to(DEVICE) for one in (logits, rows, positions, temperatures, seeds, limits, last_tokens)]
    drawn = draw(*tensors).cpu()

    own = temperatures[rows].unsqueeze(-1)
    scaled = logits.float() / torch.where(own == 0.0, 1.0, own)
    scores = torch.where(
        own == 0.0, scaled.double(), scaled.double() + gumbel_rows(seeds[rows], positions, vocab_size)
    )
    scores = scores.masked_fill(torch.arange(vocab_size) >= limits[rows].unsqueeze(-1), -torch.inf)
    assert drawn.tolist() == scores.argmax(-1).tolist()
    assert drawn[0] == 10
    assert torch.equal(tensors[-1].cpu()[rows], drawn)
    assert tensors[-1].cpu()[[4, 6]].tolist() == [-1, -1]


@pytest.mark.parametrize("cuts", [(0, 64), (0, 1024, 3072), (0, 64, 64, 4992)])
def test_what_ranks_draw_from_their_columns_is_what_is_drawn_from_whole_rows(cuts: tuple[int, ...]) -> None:
    vocab_size = 5000
    generator = torch.Generator().manual_seed(len(cuts))
    logits = torch.randn((6, vocab_size), generator=generator)
    logits[0, 10] = logits[0, 4999] = 9.0  # a tie across ranks
    rows, positions = torch.tensor([0, 3, 5, 1, 2, 7]), torch.tensor([0, 5, 1, 499, 3, 2])
    temperatures = torch.tensor([0.0, 0.6, 1.0, 2.0, 0.0, 0.3, 0.0, 0.05])
    seeds = torch.tensor([5, 2**62 + 3, -7, 8, 9, 10, 11, 12])
    limits = torch.full((8,), vocab_size)
    limits[2], limits[3] = 50, 4995
    parameters = [one.to(DEVICE) for one in (rows, positions, temperatures, seeds, limits)]
    notes = [torch.full((8,), -1, device=DEVICE) for _ in range(2)]

    whole = draw(logits.to(DEVICE), *parameters, notes[0])
    found = []
    for first, end in zip(cuts, (*cuts[1:], vocab_size), strict=True):
        # A rank without columns has one that is no token.
        part = logits[:, first:end] if end > first else torch.full((6, 1), -torch.inf)
        first_id = first if end > first else 5056
        scores, tokens = draw_part(part.to(DEVICE), *parameters, notes[1], first_id=first_id)
        found += [scores.view(torch.int64), tokens]

    assert torch.equal(best_rank(torch.stack(found, dim=-1), parameters[0], notes[1]), whole)
    assert torch.equal(*notes)
    assert whole[0] == 10


@settings(deadline=None)
@given(data=st.data())
def test_blocks_reach_the_device_in_the_step_or_before_it(data: st.DataObject) -> None:
    device_rows = DeviceRows(max_num_seqs=4, num_kv_groups=2, max_blocks=6, device=torch.device("cpu"))
    expected = np.zeros((2, 5, 6), dtype=np.int64)
    lens = [0] * 4
    number = 0
    for _ in range(data.draw(st.integers(1, 6))):
        for row in data.draw(st.lists(st.integers(0, 3), max_size=6)):
            if lens[row] == 6:
                lens[row] = 0  # another request
            number += 1
            expected[:, row, lens[row]] = [number, 1000 + number]
            device_rows.add_blocks(row, lens[row], np.array([[number], [1000 + number]]))
            lens[row] += 1
        rows = np.array(data.draw(st.lists(st.integers(0, 3), min_size=1, unique=True)))
        entries = np.array([max(0, lens[row] - 1) for row in rows])
        if (taken := device_rows.take_decode_blocks(rows, entries)) is None:
            device_rows.send_blocks()
        else:
            for group in range(2):
                for at, row in enumerate(rows):
                    if taken[group, at] != -1:
                        device_rows.block_tables[group, row, entries[at]] = int(taken[group, at])
        if data.draw(st.booleans()):
            device_rows.send_blocks()
        if not device_rows.has_unsent_blocks:
            assert device_rows.block_tables.tolist() == expected.tolist()
    device_rows.send_blocks()
    assert device_rows.block_tables.tolist() == expected.tolist()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.9, max_tokens=100)])
def test_decode_steps_on_the_device_choose_the_tokens_of_eager_steps(
    tmp_path: Path, params: SamplingParams
) -> None:
    worker = make_worker(write_tiny_llama(tmp_path), block_size=BLOCK_SIZE)
    worker.start()
    worker.initialize_kv_cache(128)
    driver = StepDriver(worker, block_size=BLOCK_SIZE)
    prompts = {"a": [5, 6, 7], "b": [9] * 6, "c": [11, 12]}
    for seed, (name, prompt) in enumerate(prompts.items()):
        driver.add(name, prompt, params, seed=seed)
    expected = {name: driver.generate("a", 12) and driver.output_tokens(name) for name in prompts}

    runner = worker._runner
    assert runner is not None
    rows = DeviceRows(max_num_seqs=8, num_kv_groups=1, max_blocks=16, device=torch.device("cpu"))

    def make_context(inputs: DecodeInputs) -> ForwardContext:
        is_real = inputs.kv_lens > 0
        step = StepRows(
            query_lens=np.ones(int(is_real.sum()), dtype=np.int64),
            kv_lens=inputs.kv_lens[is_real].long().numpy(),
            block_tables=inputs.block_tables[:, is_real].long().numpy(),
            block_size=BLOCK_SIZE,
        )
        return build_forward_context(step, dtype=torch.float32, device=torch.device("cpu"))

    decode = DecodeStep(
        worker.model,
        runner._forward._kv_caches,
        rows,
        max_num_seqs=8,
        block_size=BLOCK_SIZE,
        device=torch.device("cpu"),
        make_context=make_context,
        prepare=make_decode_inputs,
        draw=draw_part if DEVICE == "cpu" else pytest.skip("Triton compiles for the card here"),
        best_rank=best_rank,
    )
    # The first token of each comes from the eager steps; their KV is computed again, in other rows and blocks.
    numbers = np.array([6, 0, 3])
    lens = np.array([len(prompt) for prompt in prompts.values()])
    rows.set_sampling(numbers.tolist(), [params.temperature] * 3, [0, 1, 2], [384] * 3)
    made: dict[str, list[int]] = {}
    next_block = 64
    with torch.inference_mode():
        for at, (name, prompt) in enumerate(prompts.items()):
            made[name] = [expected[name][0]]
            rows.last_tokens[int(numbers[at])] = prompt[0]
            tokens = [*prompt, expected[name][0]]
            for position in range(len(prompt)):
                rows.last_tokens[int(numbers[at])] = tokens[position]
                block = next_block if position % BLOCK_SIZE == 0 else -1
                next_block += position % BLOCK_SIZE == 0
                one = slice(at, at + 1)
                decode.load(1, numbers[one], np.array([position]), np.array([0]), np.array([[block]]))
                decode.compute(1)
            rows.last_tokens[int(numbers[at])] = tokens[-1]
        for step in range(11):
            positions = lens + step
            is_new = positions % BLOCK_SIZE == 0
            new_blocks = np.where(is_new, next_block + np.arange(3), -1)[None]
            next_block += 3
            decode.load(3, numbers, positions, np.full(3, step + 1), new_blocks)
            for name, token_id in zip(prompts, decode.compute(3).tokens.tolist(), strict=True):
                made[name].append(token_id)

    assert made == {name: tokens[:12] for name, tokens in expected.items()}
    worker.close()
