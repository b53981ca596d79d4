"""The waiting queue against a list."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine.request import Request
from phalanx.engine.request_queue import RequestQueue
from support.engine import make_request


@given(st.lists(st.tuples(st.sampled_from(["append", "prepend", "pop", "remove"]), st.integers(0, 8))))
def test_the_queue_behaves_like_a_list(operations):
    queue, model = RequestQueue(), []
    for operation, number in operations:
        request_id = f"r{number}"
        if operation in ("append", "prepend"):
            if request_id in queue:
                continue
            request = Request(make_request(request_id))
            if operation == "append":
                queue.append(request)
                model.append(request_id)
            else:
                queue.prepend(request)
                model.insert(0, request_id)
        elif operation == "pop" and model:
            assert queue.pop().request_id == model.pop(0)
        elif operation == "remove":
            removed = queue.remove(request_id)
            assert (removed is not None) == (request_id in model)
            if removed is not None:
                model.remove(request_id)

        assert [request.request_id for request in queue] == model
        assert len(queue) == len(model)
        head = queue.peek()
        assert (head.request_id if head else None) == (model[0] if model else None)
