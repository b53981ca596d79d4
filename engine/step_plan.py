"""StepPlan: one step while it is being put together.

Called by: Scheduler, within one `schedule()`. Becomes a `SchedulerOutput`, whose containers it fills in place.
"""

from ..workers.messages import NewRequest
from .request import Request


class StepPlan:
    """What has been given to whom. Owner: the scheduler.

    budget:   tokens that are left
    sampling: requests that sample in this step, in the order of num_scheduled_tokens
    """

    __slots__ = (
        "budget",
        "has_grammar",
        "new_block_ids",
        "new_requests",
        "num_computed_tokens",
        "num_prefill_tokens",
        "num_scheduled_tokens",
        "sampling",
    )

    def __init__(self, *, budget: int) -> None:
        self.budget = budget
        self.has_grammar = False
        self.new_requests: list[NewRequest] = []
        self.num_scheduled_tokens: dict[str, int] = {}
        self.num_computed_tokens: list[int] = []
        self.num_prefill_tokens = 0
        self.new_block_ids: dict[str, list[int]] = {}
        self.sampling: list[Request] = []

    def add(self, request: Request, num_new_tokens: int, *, samples: bool) -> None:
        """Compute `num_new_tokens` more tokens of a request in this step."""
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.num_computed_tokens.append(request.num_computed_tokens)
        request.num_computed_tokens += num_new_tokens
        self.budget -= num_new_tokens
        if samples:
            request.num_coming_tokens += 1
            self.sampling.append(request)
            if request.matcher is not None:
                self.has_grammar = True
