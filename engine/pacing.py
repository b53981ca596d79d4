"""Pacing: when everybody's length is known, prompts fill the steps of those who decode instead of coming all at once.

Called by: Scheduler, for each step, when `scheduler.paced_step_tokens` is set, in the process of the engine core: that
of the user's program for `LLM`, which sets it for large models and sorts its requests. Pure: no clock, no peer.

A step of a few rows takes as long as its weights take to be read, with or without some hundred tokens of prompts beside
them: there prompts are computed for less than in a step of their own. A batch in which nobody waits for a first token,
and each request says how many tokens it makes, lasts as many steps as the longest of them. So the longest begin first
(longest processing time first, R. L. Graham, Bounds on multiprocessing timing anomalies, 1969), and a prompt may wait
as long as its request still ends with the longest: that is its slack. A step takes what fills it up to the paced number
of tokens, or more, so that no slack runs out. Requests of one length have none, and come as fast as they can.

The length of a request that may end early is not known: it has no slack, and nobody waits for its end.
"""

from collections.abc import Iterable, Sequence

from ..workers.sampling_params import SamplingParams
from .request import Request

PACED_STEP_TOKENS = 512
"""Enough for products to be bound by their multiplications, and in multiples of what a GPU computes at once."""
PACED_WEIGHT_BYTES = 6_000_000_000
"""Of a rank, from which on `LLM` paces: an H200 reads them in 1.4 ms; attention to a few prompts costs a step 0.5."""
_LEAST_PROMPT_TOKENS = 64
"""Of a step, also where those who decode fill it."""


def longest_first(params: SamplingParams) -> tuple[bool, int]:
    """Key to sort requests by: whose length is not known comes first, and then the longest."""
    length = params.known_output_len
    return (False, 0) if length is None else (True, -length)


class Pacer:
    """How many tokens the next step may hold. step_tokens: while slack allows; most: in any step."""

    def __init__(self, *, step_tokens: int, most: int, max_num_seqs: int) -> None:
        self._step_tokens = step_tokens
        self._most = most
        self._max_num_seqs = max_num_seqs

    def budget(self, running: Sequence[Request], waiting: Iterable[Request], num_waiting: int) -> int:
        """Return the tokens of the next step, decoding rows included.

        waiting: in the order of their arrival, which `LLM` makes that of their lengths. Whether there are blocks for
        all is not looked at: where there are not, a batch ends a few steps later than it might.
        """
        begun = [request for request in running if request.num_prefill_tokens > 0]
        if not begun and not num_waiting:
            return self._most
        if len(running) + num_waiting > self._max_num_seqs:
            # Who ends makes room for another: the end of the batch is not that of the longest.
            return self._most
        coming = [*begun, *waiting]
        longest = max(_steps_left(request) for request in (*running, *coming))
        num_tokens, needed = 0, 0
        for request in coming:
            num_tokens += request.num_prefill_tokens
            slack = longest - _steps_left(request) if request.known_output_len is not None else 0
            # Its last prompt token is computed by the step in which its slack ends.
            needed = max(needed, -(-num_tokens // (1 + max(0, slack))))
        num_decoding = len(running) - len(begun)
        filling = max(self._step_tokens - num_decoding, _LEAST_PROMPT_TOKENS)
        # Everyone who runs gets a token at least.
        return min(self._most, num_decoding + max(needed, filling, len(begun)))


def _steps_left(request: Request) -> int:
    """Steps from the one in which its prompt ends, or from now; 0 where nobody knows."""
    if request.known_output_len is None:
        return 0
    return request.num_prompt_tokens + request.known_output_len - request.num_coming_tokens
