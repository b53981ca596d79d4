"""What followers of a prefix cache are told: the sum of all deltas is what is held."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine.prefix_log import KEY_BYTES, PrefixDelta, PrefixLog, block_keys, split_keys


def apply(held: set[bytes], delta: PrefixDelta) -> None:
    if delta.clears:
        held.clear()
    held |= set(split_keys(delta.stored))
    held -= set(split_keys(delta.removed))


def name(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "little") + b"rest of a hash"


def test_nothing_is_recorded_while_nobody_follows() -> None:
    log = PrefixLog(epoch=0)
    log.record(name(1), True)

    assert log.take_delta() is None


def test_half_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole number of keys"):
        split_keys(b"x" * (KEY_BYTES + 1))


@given(
    st.lists(
        st.one_of(st.integers(0, 5), st.sampled_from(["clear", "delta", "follow"])),
        max_size=60,
    )
)
def test_the_deltas_add_up_to_what_is_held_for_old_and_new_followers(events: list[int | str]) -> None:
    log, truth = PrefixLog(epoch=3), set[bytes]()
    followers: list[set[bytes]] = []
    sequence = -1

    def tell() -> None:
        nonlocal sequence
        if delta := log.take_delta():
            assert (delta.epoch, delta.sequence) == (3, sequence + 1)
            sequence = delta.sequence
            for held in followers:
                apply(held, delta)

    for event in [*events, "delta"]:
        if event == "clear":
            truth.clear()
            log.record_cleared()
        elif event == "delta":
            tell()
            assert all(held == set(block_keys(truth)) for held in followers)
        elif event == "follow":
            tell()
            snapshot = log.follow(truth)
            assert snapshot.sequence == sequence
            held = {b"stale..."}
            apply(held, snapshot)
            followers.append(held)
        else:
            block_hash = name(int(event))
            truth ^= {block_hash}
            log.record(block_hash, block_hash in truth)
