"""What a request needs of each KV cache group, against a table that is filled column by column."""

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engine.kv_layout import UNBOUNDED_TOKENS, KVLayout

WINDOWS = st.lists(st.one_of(st.none(), st.integers(1, 20)), min_size=1, max_size=3)


def held_blocks(windows, block_size, computed, stop):
    """Blocks with a token that the queries from `computed` to `stop` see or write."""
    count = 0
    for window in windows:
        first = 0 if window is None else max(0, computed - window + 1)
        count += len({position // block_size for position in range(first, stop)})
    return count


@settings(max_examples=150, deadline=None)
@given(
    windows=WINDOWS,
    block_size=st.sampled_from([1, 2, 4, 8]),
    max_step_tokens=st.integers(1, 20),
    num_tokens=st.integers(1, 60),
    data=st.data(),
)
def test_a_request_never_holds_more_than_was_foreseen(windows, block_size, max_step_tokens, num_tokens, data):
    layout = KVLayout(block_size=block_size, windows=windows, max_step_tokens=max_step_tokens)
    hit_columns = data.draw(st.integers(0, (num_tokens - 1) // block_size))
    computed = hit_columns * block_size
    while computed < num_tokens:
        step = data.draw(st.integers(1, min(max_step_tokens, num_tokens - computed)))
        held = held_blocks(windows, block_size, computed, computed + step)
        assert held <= layout.max_blocks(num_tokens, hit_columns)
        for group, window in enumerate(windows):
            if window is not None:
                seen = range(max(0, computed - window + 1), computed + step)
                assert layout.num_passed_columns(group, computed) == seen[0] // block_size
        computed += step


@settings(max_examples=100, deadline=None)
@given(
    windows=WINDOWS,
    block_size=st.sampled_from([1, 4]),
    max_step_tokens=st.integers(1, 20),
    num_blocks=st.integers(1, 80),
)
def test_the_capacity_is_the_longest_request_that_fits(windows, block_size, max_step_tokens, num_blocks):
    layout = KVLayout(block_size=block_size, windows=windows, max_step_tokens=max_step_tokens)

    capacity = layout.capacity_tokens(num_blocks)

    assert layout.max_blocks(capacity) <= num_blocks
    if capacity != UNBOUNDED_TOKENS:
        assert layout.max_blocks(capacity + 1) > num_blocks


def test_a_cache_in_which_all_layers_have_a_window_holds_any_length():
    layout = KVLayout(block_size=4, windows=(8, 8), max_step_tokens=8)

    assert layout.capacity_tokens(2 * 5) == UNBOUNDED_TOKENS
    assert layout.capacity_tokens(2 * 5 - 1) == 16
