"""What the scheduler says of itself: a frozen record, taken between two steps.

Called by: Scheduler builds it; EngineCore adds who and when, and sends it as `EngineStats`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Load now, and counters since the start.

    num_prefill_tokens: tokens of waiting and running requests that are still to be prefilled
    num_running_tokens: tokens of running requests that are in the KV cache
    num_free_tokens:    of one request that would take all free blocks
    kv_usage:           part of the blocks that running requests hold. [0, 1]
    num_*_total, num_preemptions, num_steps, prefix_*: counters; num_steps and num_*_total of steps that are back
    num_context_tokens_total: tokens in the KV cache for the requests of a step, when it began; summed over the steps
    """

    num_waiting: int
    num_running: int
    num_prefill_tokens: int
    kv_usage: float
    num_free_blocks: int
    num_free_tokens: int
    num_blocks: int
    num_running_tokens: int
    num_steps: int
    num_preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    num_prefill_tokens_total: int
    num_context_tokens_total: int
    num_output_tokens_total: int
