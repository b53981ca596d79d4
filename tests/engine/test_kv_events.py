"""KV events: whoever follows them knows what can be hit."""

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engine.block_hash import ROOT_HASH, hash_block
from phalanx.engine.kv_cache_manager import KVCacheManager
from phalanx.engine.kv_events import BlockStored, KVEventBatch, KVEventLog, follow
from support.engine import make_state


def make_manager(*, num_blocks=12, num_kept=1000):
    log = KVEventLog(dp_rank=1, epoch=2, num_kept=num_kept)
    manager = KVCacheManager(num_blocks=num_blocks, block_size=2, enable_prefix_caching=True, events=log)
    return manager, log


def admit(manager, request):
    hits = manager.get_computed_blocks(request)
    request.num_computed_tokens = len(hits) * manager.block_size
    return manager.allocate_slots(request, request.num_uncomputed_tokens, hits)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), num_kept=st.integers(1, 8))
def test_batches_a_replay_and_a_snapshot_all_lead_to_what_the_pool_holds(seed, num_kept):
    rng = random.Random(seed)
    manager, log = make_manager(num_kept=num_kept)
    live, followed, batches = [], set(), []
    for number in range(30):
        request = make_state(
            f"r{number}", prompt_token_ids=[rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        )
        if admit(manager, request) is not None:
            live.append(request)
        if live and rng.random() < 0.6:
            manager.free(live.pop(rng.randrange(len(live))))
        if not live and rng.random() < 0.3:
            assert manager.reset_prefix_cache()
        if (batch := log.take_batch()) is not None:
            batches.append(msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch))
            follow(followed, batches[-1:])
        held = set(manager._pool._by_hash)
        assert followed == held
        late = set()
        follow(late, [log.snapshot()])
        assert late == held

    assert [batch.sequence for batch in batches] == list(range(log.next_sequence))
    assert {(batch.dp_rank, batch.epoch) for batch in batches} == {(1, 2)}
    for first in range(log.next_sequence + 2):
        replayed = log.replay(first)
        if first < log.next_sequence - num_kept:
            assert replayed is None
        else:
            assert replayed == batches[first:]


def test_a_stored_block_says_all_that_its_hash_is_made_of():
    manager, log = make_manager()
    request = make_state("a", prompt_token_ids=[1, 2, 3, 4, 5], cache_salt="s")

    admit(manager, request)

    batch = log.take_batch()
    assert batch is not None
    first, second = batch.events
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.block_hash == hash_block(ROOT_HASH, first.token_ids, first.extra_keys)
    assert first.extra_keys == [("salt", b"s")]
    assert second.parent_hash == first.block_hash
    assert second.block_hash == hash_block(first.block_hash, second.token_ids)
    assert log.take_batch() is None


def test_prompts_of_different_salts_share_nothing_and_of_equal_ones_all():
    manager, _ = make_manager()
    tokens = [1, 2, 3, 4, 5]
    admit(manager, make_state("a", prompt_token_ids=tokens, cache_salt="x"))

    found = {
        salt: len(manager.get_computed_blocks(make_state("b", prompt_token_ids=tokens, cache_salt=salt)))
        for salt in (None, "x", "y", "xy")
    }

    assert found == {None: 0, "x": 2, "y": 0, "xy": 0}
