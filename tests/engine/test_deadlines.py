"""Deadlines, against a list that is searched."""

import random

from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine.deadlines import DeadlineHeap


@given(st.lists(st.integers(0, 50), max_size=60), st.randoms(use_true_random=False))
def test_the_next_one_and_those_that_are_due_are_among_those_that_are_not_over(
    instants: list[int], rng: random.Random
) -> None:
    over: set[int] = set()
    waiting: dict[int, int] = {}
    heap = DeadlineHeap[int](over.__contains__)

    for item, due_at in enumerate(instants):
        heap.add(due_at, item)
        waiting[item] = due_at
        if rng.random() < 0.4:
            over.add(gone := rng.choice(list(waiting)))
            del waiting[gone]
        if rng.random() < 0.2:
            now = rng.randrange(50)
            due = {name for name, due_at in waiting.items() if due_at <= now}
            assert set(heap.pop_due(now)) == due
            for name in due:
                del waiting[name]
        assert heap.next_at == min(waiting.values(), default=None)


def test_many_that_wait_are_not_looked_at_for_each_that_comes_or_ends() -> None:
    num_items, over = 2000, set()
    num_looks = 0

    def is_over(item: int) -> bool:
        nonlocal num_looks
        num_looks += 1
        return item in over

    heap = DeadlineHeap[int](is_over)
    for item in range(num_items):
        heap.add(float(item), item)
        assert heap.next_at == 0.0
    for item in range(num_items):
        assert heap.next_at == float(item)
        over.add(item)

    assert heap.next_at is None
    assert num_looks < 10 * num_items
