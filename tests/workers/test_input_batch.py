"""Rows: what a step is made of, and differences that do not fit."""

import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from phalanx.workers.input_batch import InputBatch
from phalanx.workers.logit_processors import unpack_masks
from phalanx.workers.messages import GrammarMasks, NewRequest, RowState, SchedulerOutput
from phalanx.workers.sampling_params import SamplingParams
from phalanx.workers.step_input import ON_DEVICE


def make_batch(max_num_seqs: int = 3) -> InputBatch:
    return InputBatch(
        max_num_seqs=max_num_seqs, max_model_len=32, block_size=4, vocab_size=100, device=torch.device("cpu")
    )


def new(request_id: str, token_ids: list[int], block_ids: list[int], **changes: object) -> NewRequest:
    fields = {
        "request_id": request_id,
        "token_ids": token_ids,
        "num_prompt_tokens": len(token_ids),
        "num_computed_tokens": 0,
        "block_ids": block_ids,
        "sampling_params": SamplingParams(temperature=0.0),
        "seed": 1,
    }
    return NewRequest(**{**fields, **changes})  # type: ignore[arg-type]


def update(
    batch: InputBatch,
    *,
    added: list[NewRequest] | None = None,
    grown: dict[str, list[int]] | None = None,
    computed: dict[str, int] | None = None,
    removed: list[str] | None = None,
) -> None:
    batch.update(
        SchedulerOutput(
            step=1,
            new_requests=added or [],
            num_scheduled_tokens=dict.fromkeys(computed or {}, 1),
            num_computed_tokens=list((computed or {}).values()),
            new_block_ids=grown or {},
            removed_request_ids=removed or [],
        )
    )


def test_a_step_lays_chunks_and_decodes_side_by_side() -> None:
    batch = make_batch()
    update(
        batch,
        added=[new("a", [10, 11, 12, 13, 14], [7, 3]), new("b", [20, 21, 22], [5], num_computed_tokens=2)],
    )

    step = batch.build_step({"b": 1, "a": 3})

    assert step.token_ids.tolist() == [22, 10, 11, 12]
    assert step.positions.tolist() == [2, 0, 1, 2]
    assert step.rows.kv_lens.tolist() == [3, 3]
    assert step.rows.block_tables[0, :, 0].tolist() == [5, 7]
    assert [step.request_ids[row] for row in step.sampling_rows] == ["b"]
    assert step.last_token_index.tolist() == [0]


def test_sampled_tokens_are_the_next_steps_input() -> None:
    batch = make_batch()
    update(batch, added=[new("a", [10, 11, 12, 13], [7])])
    step = batch.build_step({"a": 4})
    assert batch.sampling_batch(step).positions.tolist() == [0]
    sampled = batch.finish_step(step)

    update(batch, grown={"a": [9]}, computed={"a": 4})
    step = batch.build_step({"a": 1})

    assert (step.token_ids.tolist(), step.positions.tolist()) == ([ON_DEVICE], [4])
    batch.learn(sampled, np.array([42]))
    assert batch.build_step({"a": 1}).token_ids.tolist() == [42]
    assert step.rows.block_tables.tolist() == [[[7, 9]]]
    assert batch.sampling_batch(step).positions.tolist() == [1]


def test_a_row_is_used_again_with_its_own_parameters() -> None:
    batch = make_batch(max_num_seqs=1)
    update(batch, added=[new("a", [1], [1], sampling_params=SamplingParams(temperature=0.5, top_k=3))])
    before = batch.sampling_batch(batch.build_step({"a": 1}))

    update(batch, removed=["a", "unknown"], added=[new("b", [2], [2], seed=9)])
    after = batch.sampling_batch(batch.build_step({"b": 1}))

    assert (before.all_greedy, before.any_filtered, before.seeds.tolist()) == (False, True, [1])
    assert (after.all_greedy, after.any_filtered, after.seeds.tolist()) == (True, False, [9])


def test_min_tokens_bans_until_enough_are_made() -> None:
    batch = make_batch()
    params = SamplingParams(temperature=0.0, min_tokens=2)
    ends = (5, 6, 5, 100)
    update(
        batch,
        added=[
            new("early", [1, 2], [1], num_prompt_tokens=1, sampling_params=params, stop_token_ids=ends),
            new("late", [1, 2, 3], [2], num_prompt_tokens=1, sampling_params=params, stop_token_ids=(5,)),
        ],
    )

    held_back = batch.sampling_batch(batch.build_step({"early": 2, "late": 3})).held_back

    assert held_back is not None
    assert held_back.row_index.tolist() == [0]
    assert held_back.token_ids.tolist() == [5, 6]


def test_chunks_of_a_prompt_name_the_prompt_tokens_that_follow() -> None:
    batch = make_batch()
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    update(
        batch,
        added=[
            new("a", [10, 11, 12, 13, 14], [1, 2], sampling_params=params),
            new("one", [7], [3], sampling_params=params),
            # It was preempted after its first output: its prompt was told of then.
            new("resumed", [20, 21, 22], [4], num_prompt_tokens=2, sampling_params=params),
        ],
    )

    first = batch.build_step({"resumed": 2, "a": 3, "one": 1})
    chunks = batch.prompt_chunks(first)
    batch.finish_step(first)
    second = batch.prompt_chunks(batch.build_step({"one": 1, "a": 2}))

    assert [(chunk.start, chunk.stop, chunk.next_ids.tolist()) for chunk in chunks] == [
        (2, 5, [11, 12, 13]),
        (5, 5, []),
    ]
    assert [(chunk.start, chunk.stop, chunk.next_ids.tolist()) for chunk in second] == [(1, 2, [14])]
    with pytest.raises(RuntimeError, match="finds a part of it"):
        update(
            batch, removed=["a"], added=[new("b", [1, 2], [5], num_computed_tokens=1, sampling_params=params)]
        )


def test_what_does_not_fit_is_an_error() -> None:
    batch = make_batch(max_num_seqs=1)
    update(batch, added=[new("a", [1, 2, 3, 4, 5], [1])])

    with pytest.raises(RuntimeError, match="held here already"):
        update(batch, added=[new("a", [1], [2])])
    with pytest.raises(RuntimeError, match="all rows are taken"):
        update(batch, added=[new("b", [1], [2])])
    with pytest.raises(RuntimeError, match="no blocks"):
        batch.build_step({"a": 5})
    with pytest.raises(RuntimeError, match="do not have"):
        batch.build_step({"a": 6})
    with pytest.raises(RuntimeError, match="not held here"):
        batch.build_step({"b": 1})
    with pytest.raises(RuntimeError, match="longer than a row"):
        update(batch, grown={"a": list(range(2, 12))})
    with pytest.raises(RuntimeError, match="computed tokens"):
        update(batch, computed={"a": 1})
    with pytest.raises(RuntimeError, match="not held here"):
        update(batch, computed={"b": 0})


def masks(**allowed: list[int]) -> GrammarMasks:
    words = np.zeros((len(allowed), 4), dtype=np.uint32)
    for row, token_ids in zip(words, allowed.values(), strict=True):
        for token_id in token_ids:
            row[token_id // 32] |= np.uint32(1 << token_id % 32)
    return GrammarMasks(step=1, request_ids=list(allowed), bits=words.tobytes())


def test_masks_find_their_rows_by_name_and_chunks_have_none() -> None:
    batch = make_batch()
    update(batch, added=[new("a", [1, 2], [1]), new("b", [3], [2]), new("c", [4], [3])])
    step = batch.build_step({"a": 1, "b": 1, "c": 1})

    sampling = batch.sampling_batch(step, masks(c=[0, 99], b=[31, 32]))

    assert sampling.grammar is not None
    allowed = unpack_masks(sampling.grammar.words, 100)
    rows = dict(zip(sampling.grammar.row_index.tolist(), allowed, strict=True))
    assert rows[0].nonzero().flatten().tolist() == [31, 32]
    assert rows[1].nonzero().flatten().tolist() == [0, 99]
    with pytest.raises(RuntimeError, match="do not sample"):
        batch.sampling_batch(step, masks(a=[1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 6}, "has 6 tokens to the scheduler, and 5 here"),
        ({"known_digest": 1}, "other tokens"),
        ({"block_ids": [7, 4]}, r"the blocks \[\[7, 4\]\] to the scheduler, and \[\[7, 3\]\] here"),
        ({"block_ids": [7]}, "the blocks"),
    ],
)
def test_a_row_that_is_not_what_the_scheduler_takes_it_for_is_noticed(
    change: dict[str, Any], message: str
) -> None:
    batch = make_batch()
    tokens = [10, 11, 12, 13, 14]
    right = RowState(
        num_tokens=5,
        num_known=5,
        known_digest=zlib.crc32(np.array(tokens, dtype="<i4")),
        block_ids=[0, 3],
    )
    step = SchedulerOutput(
        step=1,
        new_requests=[new("a", tokens, [7, 3])],
        num_scheduled_tokens={"a": 5},
        num_computed_tokens=[0],
        removed_request_ids=[],
        row_states={"a": msgspec.structs.replace(right, **change)},
    )

    with pytest.raises(RuntimeError, match=message):
        batch.update(step)

    make_batch().update(msgspec.structs.replace(step, row_states={"a": right}))
