"""Block tables and the prefix cache, against a dictionary of prefixes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engine.block_hash import ROOT_HASH, hash_block
from phalanx.engine.kv_cache_manager import KVCacheManager
from support.engine import make_state


def make_manager(num_blocks=16, block_size=4, enable_prefix_caching=True):
    return KVCacheManager(
        num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching
    )


def admit(manager, request):
    hits = manager.get_computed_blocks(request)
    request.num_computed_tokens = len(hits) * manager.block_size
    return manager.allocate_slots(request, request.num_uncomputed_tokens, hits)


def make(request_id, tokens):
    return make_state(request_id, prompt_token_ids=tokens)


def test_a_refusal_changes_nothing():
    manager = make_manager(num_blocks=4)
    a = make("a", list(range(8)))
    admit(manager, a)
    manager.free(a)
    request = make("b", [*range(8), *range(20, 30)])
    hits = manager.get_computed_blocks(request)
    request.num_computed_tokens = len(hits) * 4

    assert len(hits) == 2
    assert manager.allocate_slots(request, 10, hits) is None
    assert not manager.has_room_for(request, hits, 0)

    assert manager.num_free_blocks == 3
    assert manager.get_computed_blocks(request) == hits
    manager.check_invariants()


def test_a_hit_that_is_free_counts_as_needed():
    manager = make_manager(num_blocks=4)
    a = make("a", list(range(4)))
    admit(manager, a)
    admit(manager, make("b", list(range(50, 58))))
    manager.free(a)
    request = make("c", list(range(8)))

    assert admit(manager, request) is None


def test_tails_are_evicted_before_heads():
    manager = make_manager(num_blocks=4)
    a = make("a", list(range(12)))
    admit(manager, a)
    manager.free(a)

    admit(manager, make("b", [90, 91, 92, 93]))

    assert len(manager.get_computed_blocks(make("c", list(range(13))))) == 2


def test_without_prefix_caching_nothing_is_found():
    manager = make_manager(enable_prefix_caching=False)
    admit(manager, make("a", list(range(12))))

    assert manager.get_computed_blocks(make("b", list(range(12)))) == []


def test_a_reset_tells_the_truth():
    manager = make_manager()
    a = make("a", list(range(12)))
    admit(manager, a)

    assert not manager.reset_prefix_cache()
    manager.free(a)
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(make("b", list(range(12)))) == []


def test_hashes_tell_prefixes_kinds_and_lengths_apart():
    names = {
        hash_block(ROOT_HASH, [1, 2]),
        hash_block(ROOT_HASH, [1, 2], [("salt", b"x")]),
        hash_block(ROOT_HASH, [1, 2], [("adapter", b"x")]),
        hash_block(ROOT_HASH, [1, 2], [("salt", b"x"), ("adapter", b"")]),
        hash_block(ROOT_HASH, [1, 2], [("salt", b"xadapter")]),
        hash_block(ROOT_HASH, [1]),
        hash_block(ROOT_HASH, [258]),
        hash_block(hash_block(ROOT_HASH, [0, 0]), [1, 2]),
    }

    assert len(names) == 8


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.booleans()),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from([1, 2, 4]),
)
def test_a_hit_is_always_a_prefix_that_was_computed(requests, block_size):
    manager = make_manager(num_blocks=12, block_size=block_size)
    computed, contents, live = set(), {}, []
    for index, (tokens, frees_oldest) in enumerate(requests):
        request = make(f"r{index}", tokens)
        hits = manager.get_computed_blocks(request)
        assert len(hits) * block_size <= len(tokens) - 1
        for number, block in enumerate(hits):
            prefix = tuple(tokens[: (number + 1) * block_size])
            assert prefix in computed
            assert contents[block.block_id] == prefix
        if admit(manager, request) is not None:
            live.append(request)
            for number, block_id in enumerate(manager.get_block_ids(request.request_id)):
                prefix = tuple(tokens[: (number + 1) * block_size])
                if number >= len(hits):
                    contents[block_id] = prefix
                if len(prefix) == (number + 1) * block_size:
                    computed.add(prefix)
        if frees_oldest and live:
            manager.free(live.pop(0))
        manager.check_invariants()
    for request in live:
        manager.free(request)
    assert manager.num_free_blocks == 11
    assert manager.usage == 0.0


def test_free_tokens_are_those_of_one_request_whatever_its_columns_take():
    full = make_manager(num_blocks=13)
    assert (full.num_free_blocks, full.num_free_tokens) == (12, 48)

    # Two groups of layers: a column of four tokens takes a block of each.
    hybrid = KVCacheManager(
        num_blocks=13,
        block_size=4,
        enable_prefix_caching=True,
        windows=(None, 1000),
        max_step_tokens=1000,
    )
    assert (hybrid.num_free_blocks, hybrid.num_free_tokens) == (12, 24)
    request = make("a", list(range(16)))
    admit(hybrid, request)
    assert (hybrid.num_free_blocks, hybrid.num_free_tokens) == (4, 8)
