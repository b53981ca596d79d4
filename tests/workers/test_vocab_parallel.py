"""Each rank samples from its own columns: the same tokens and numbers as from whole rows, on every rank."""

import dataclasses
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from phalanx.shm.collective_arena import create_arena
from phalanx.workers.config import LogprobsMode
from phalanx.workers.sampler import Sampled, sample
from phalanx.workers.shm_group import connect_shm
from phalanx.workers.span import Span
from phalanx.workers.vocab_columns import VocabShard
from support.sampling_oracle import Row, batch_of, hold, logits_of, random_row

SIZE = 300


def spans(size: int, num_ranks: int) -> list[Span]:
    """In units of 64, as a model's partition; some ranks may hold nothing."""
    units = -(-size // 64)
    edges = [min(size, 64 * (units * rank // num_ranks)) for rank in range(num_ranks + 1)]
    return [Span(start=low, size=high - low) for low, high in itertools.pairwise(edges)]


def in_parts(
    rows: list[Row], parts: list[Span], *, mode: LogprobsMode, num_steps: int = 1
) -> list[list[Sampled]]:
    """Sample on all ranks at once, each in a thread with rows of its own. Returns the steps of each rank."""
    segment = create_arena("test", num_ranks=len(parts), slot_bytes=1 << 16)
    whole = logits_of(rows)

    def run(rank: int) -> list[Sampled]:
        group = connect_shm(os.dup(segment.fd), rank=rank, timeout_s=60)
        try:
            shard = VocabShard(group, parts[rank], SIZE)
            own = shard.fill(whole[:, parts[rank].start : parts[rank].stop].contiguous())
            held = hold(rows, mode=mode)
            assert not held.needs_whole_rows(np.arange(len(rows)))
            steps = []
            for step in range(num_steps):
                counts = np.array([len(row.output) + step for row in rows])
                constrained = batch_of(held, rows).grammar
                batch = held.batch(np.arange(len(rows)), counts)
                steps.append(sample(own, dataclasses.replace(batch, grammar=constrained), shard))
                held.append(steps[-1].token_ids)
            return steps
        finally:
            group.close()

    try:
        with ThreadPoolExecutor(len(parts)) as pool:
            return list(pool.map(run, range(len(parts))))
    finally:
        segment.close()


def in_whole(rows: list[Row], *, mode: LogprobsMode, num_steps: int = 1) -> list[Sampled]:
    held = hold(rows, mode=mode)
    steps = []
    for step in range(num_steps):
        counts = np.array([len(row.output) + step for row in rows])
        constrained = batch_of(held, rows).grammar
        batch = held.batch(np.arange(len(rows)), counts)
        steps.append(sample(logits_of(rows), dataclasses.replace(batch, grammar=constrained)))
        held.append(steps[-1].token_ids)
    return steps


def random_rows(seed: int, count: int) -> list[Row]:
    """Anything but what needs whole rows."""
    generator = np.random.default_rng(seed)
    rows = []
    while len(rows) < count:
        top_k = int(generator.choice([0, 1, 5, 40, 250]))
        changes: dict[str, object] = {"top_k": top_k, "logprobs": int(generator.choice([0, 1, 5]))}
        if top_k == 0:
            changes["top_p"] = 1.0
        rows.append(random_row(generator, SIZE, **changes))
    return rows


def check_equal(whole: Sampled, part: Sampled) -> None:
    assert torch.equal(part.token_ids, whole.token_ids)
    for expected, found in zip(whole.logprobs, part.logprobs, strict=True):
        torch.testing.assert_close(found.values, expected.values, rtol=0, atol=1e-6)
        assert torch.equal(found.ranks, expected.ranks)
        assert torch.equal(found.token_ids[:, 0], expected.token_ids[:, 0])


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("mode", [LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS])
@pytest.mark.parametrize("seed", range(2))
def test_parts_give_what_whole_rows_give(num_ranks: int, mode: LogprobsMode, seed: int) -> None:
    rows = random_rows(seed, 12)
    expected = in_whole(rows, mode=mode, num_steps=3)

    for steps in in_parts(rows, spans(SIZE, num_ranks), mode=mode, num_steps=3):
        for whole, part in zip(expected, steps, strict=True):
            check_equal(whole, part)


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 5])
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_parts_give_what_whole_rows_give(num_ranks: int, seed: int) -> None:
    rows = random_rows(seed, 20)
    (expected,) = in_whole(rows, mode=LogprobsMode.RAW_LOGPROBS)

    for (part,) in in_parts(rows, spans(SIZE, num_ranks), mode=LogprobsMode.RAW_LOGPROBS):
        check_equal(expected, part)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_logits_on_several_ranks_go_to_the_lowest_id(temperature: float) -> None:
    generator = np.random.default_rng(3)
    rows = [
        random_row(generator, SIZE, temperature=temperature, top_k=3, top_p=0.9, logprobs=1) for _ in range(6)
    ]
    flat = [
        Row(logits=np.zeros(SIZE, dtype=np.float32), params=row.params, seed=row.seed, prompt=[0])
        for row in rows
    ]
    (expected,) = in_whole(flat, mode=LogprobsMode.PROCESSED_LOGITS)

    for (part,) in in_parts(flat, spans(SIZE, 3), mode=LogprobsMode.PROCESSED_LOGITS):
        assert torch.equal(part.token_ids, expected.token_ids)


@pytest.mark.parametrize(
    ("params", "is_whole"),
    [
        ({"top_p": 0.9, "top_k": 0}, True),
        ({"top_p": 0.9, "top_k": 0, "temperature": 0.0}, False),
        ({"top_p": 0.9, "top_k": 40}, False),
        ({"top_k": 257}, True),
        ({"min_p": 0.3, "top_p": 1.0, "top_k": 0}, False),
        ({"logprobs": 256, "top_p": 1.0, "top_k": 0}, False),
        ({"logprobs": -1, "top_p": 1.0, "top_k": 0}, True),
    ],
)
def test_what_needs_whole_rows_says_so(params: dict[str, object], is_whole: bool) -> None:
    row = random_row(np.random.default_rng(0), SIZE, **{"temperature": 1.0, **params})

    assert hold([row]).needs_whole_rows(np.array([0])) is is_whole
