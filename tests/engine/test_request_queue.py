"""The waiting queue: its order, who is passed over, and for how long."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine.request_queue import RequestQueue
from support.engine import make_state

ANYONE = lambda request: True  # noqa: E731


def make_queue(max_overtakes=10**9):
    return RequestQueue(max_overtakes=max_overtakes)


def pop(queue, can_be_admitted=ANYONE):
    request = queue.peek(can_be_admitted)
    if request is None:
        return None
    queue.admit(request)
    return request.request_id


@given(
    operations=st.lists(
        st.tuples(
            st.sampled_from(["append", "pop", "put back", "remove"]), st.integers(0, 8), st.integers(0, 2)
        )
    ),
    shut=st.sets(st.integers(0, 8)),
)
def test_the_queue_gives_the_smallest_order_that_can_be_admitted(operations, shut):
    queue, model, out, numbers = make_queue(), {}, {}, itertools.count()

    def is_open(request):
        return int(request.request_id[1:]) not in shut

    for operation, number, priority in operations:
        request_id = f"r{number}"
        if operation == "append" and request_id not in queue and request_id not in out:
            model[request_id] = make_state(request_id, number=next(numbers), priority=priority)
            queue.append(model[request_id])
        elif operation == "put back" and request_id in out:
            model[request_id] = out.pop(request_id)
            queue.put_back(model[request_id])
        elif operation == "pop":
            candidates = [request for request in model.values() if is_open(request)]
            expected = min(candidates, key=lambda request: request.order, default=None)
            assert pop(queue, is_open) == (expected.request_id if expected else None)
            if expected is not None:
                out[expected.request_id] = model.pop(expected.request_id)
        elif operation == "remove":
            assert queue.remove(request_id) is model.pop(request_id, None)

        assert {request.request_id for request in queue} == model.keys()
        assert len(queue) == len(model)


def test_one_priority_is_first_come_first_served_and_a_preempted_request_comes_first():
    queue = make_queue()
    requests = [make_state(f"r{number}", number=number) for number in range(3)]
    queue.append(requests[0])
    assert pop(queue) == "r0"
    queue.append(requests[1])
    queue.append(requests[2])

    queue.put_back(requests[0])

    assert [pop(queue) for _ in range(4)] == ["r0", "r1", "r2", None]


def test_a_request_that_came_back_twice_is_given_out_once():
    queue = make_queue(max_overtakes=0)
    request = make_state("a")
    queue.append(request)
    for _ in range(3):
        assert pop(queue) == "a"
        queue.put_back(request)

    assert [pop(queue), pop(queue)] == ["a", None]


@given(bound=st.integers(0, 5), num_rivals=st.integers(1, 30))
def test_better_priorities_overtake_the_oldest_request_only_so_often(bound, num_rivals):
    queue = make_queue(max_overtakes=bound)
    queue.append(make_state("patient", number=0, priority=9))
    for number in range(num_rivals):
        queue.append(make_state(f"r{number}", number=number + 1, priority=0))

    order = [pop(queue) for _ in range(num_rivals + 1)]

    assert order.index("patient") == min(bound, num_rivals)


def test_many_removals_leave_nothing_behind():
    queue = make_queue()
    for number in range(1000):
        queue.append(make_state(f"r{number}", number=number))
        queue.remove(f"r{number}")

    assert len(queue._heap) < 40
    assert queue.peek(ANYONE) is None
