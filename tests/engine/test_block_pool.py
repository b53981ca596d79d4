"""The block pool: books that always balance."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phalanx.engine.block_pool import NULL_BLOCK_ID, BlockPool


def test_the_null_block_is_never_given_out():
    pool = BlockPool(4)

    blocks = pool.allocate(3)

    assert NULL_BLOCK_ID not in {block.block_id for block in blocks}
    assert pool.num_free_blocks == 0
    assert pool.usage == 1.0


def test_unhashed_blocks_are_reused_before_hashed_ones_and_those_in_order_of_use():
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for index in (0, 1, 2):
        pool.publish(blocks[index], bytes([index]))

    pool.free([blocks[2], blocks[1], blocks[0], blocks[3]])

    assert pool.allocate(4) == [blocks[3], blocks[2], blocks[1], blocks[0]]


def test_a_free_block_keeps_its_contents_until_it_is_taken():
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.publish(first, b"x")
    pool.free([second, first])

    assert pool.get_cached_block(b"x") is first
    pool.allocate(2)

    assert pool.get_cached_block(b"x") is None


def test_a_duplicate_does_not_replace_the_block_that_is_known():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.publish(first, b"x")
    pool.publish(second, b"x")

    pool.free([second])
    pool.allocate(2)

    assert pool.get_cached_block(b"x") is first
    pool.check_invariants()


def test_freeing_twice_is_a_bug_that_shows():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.free(blocks)

    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_a_reset_is_refused_while_a_block_is_in_use():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], b"x")

    assert not pool.reset_cache()
    assert pool.get_cached_block(b"x") is blocks[0]
    pool.free(blocks)
    assert pool.reset_cache()
    assert pool.get_cached_block(b"x") is None
    assert pool.num_free_blocks == 2


class BlockPoolMachine(RuleBasedStateMachine):
    """Random tables over a small pool, with a plain dictionary as the model of the map."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(9)
        self.tables = []

    @rule(num=st.integers(1, 4), data=st.data())
    def allocate(self, num, data):
        if num <= self.pool.num_free_blocks:
            blocks = self.pool.allocate(num)
            self.tables.append(blocks)
            for block in blocks:
                name = data.draw(st.one_of(st.none(), st.integers(0, 12)))
                if name is not None:
                    self.pool.publish(block, bytes([name]))

    @rule(name=st.integers(0, 12))
    def hit(self, name):
        block = self.pool.get_cached_block(bytes([name]))
        if block is not None:
            assert block.block_hash == bytes([name])
            self.pool.touch([block])
            self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(reversed(table))

    @invariant()
    def books_balance(self):
        self.pool.check_invariants()
        refs = {}
        for table in self.tables:
            for block in table:
                refs[block.block_id] = refs.get(block.block_id, 0) + 1
                assert block.num_refs > 0
        assert len(refs) == self.pool.num_blocks - self.pool.num_free_blocks


BlockPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockPoolMachine = BlockPoolMachine.TestCase
