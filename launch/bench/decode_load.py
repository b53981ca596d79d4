"""Many requests in the middle of their decoding, in a real scheduler without a model.

Called by: scheduler.py, which times the scheduler, and executor.py, which needs realistic steps to send. The model's
part is played by `sample_all`: every request of the step samples one token.
"""

from ...engine.config import SchedulerConfig
from ...engine.kv_cache_manager import KVCacheManager
from ...engine.messages import EngineCoreRequest
from ...engine.scheduler import Scheduler
from ...workers.messages import ModelRunnerOutput, SchedulerOutput
from ...workers.sampling_params import SamplingParams

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
_SAMPLED_TOKEN_ID = 7


def sample_all(scheduled: SchedulerOutput) -> ModelRunnerOutput:
    """Return what a step samples in which no prompt is cut into chunks."""
    request_ids = list(scheduled.num_scheduled_tokens)
    return ModelRunnerOutput(
        step=scheduled.step,
        request_ids=request_ids,
        sampled_token_ids=[_SAMPLED_TOKEN_ID] * len(request_ids),
    )


def start_decoding(num_requests: int, num_context_tokens: int, num_steps: int) -> Scheduler:
    """Return a scheduler whose `num_requests` requests have all been prefilled, each with its own prompt.

    num_steps: decode steps that may follow before a request ends or blocks run out
    """
    num_tokens = num_context_tokens + num_steps + 2
    # A little more than is needed: the scheduler keeps some free while it admits.
    num_blocks = int(num_requests * -(-num_tokens // BLOCK_SIZE) * 1.05) + 64
    config = SchedulerConfig(
        max_num_seqs=num_requests,
        # All prompts are prefilled in one step, and that is not measured.
        max_num_batched_tokens=2 * num_requests * num_tokens,
        max_num_waiting=num_requests,
        long_prefill_share=1.0,
    )
    scheduler = Scheduler(
        config,
        KVCacheManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=True),
        max_model_len=num_tokens + BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
    )
    for index in range(num_requests):
        scheduler.add_request(
            EngineCoreRequest(
                request_id=f"cmpl-{index:032x}",
                client_index=0,
                prompt_token_ids=[(index + position) % VOCAB_SIZE for position in range(num_context_tokens)],
                sampling_params=SamplingParams(max_tokens=num_steps + 2),
                eos_token_ids=(),
                seed=index,
                arrived_at=0.0,
            )
        )
    scheduled = scheduler.schedule()
    assert scheduled is not None
    assert len(scheduled.num_scheduled_tokens) == num_requests, "all are prefilled in one step"
    scheduler.update_from_output(scheduled, sample_all(scheduled))
    return scheduler


def decode_steps(num_requests: int, num_context_tokens: int, num_steps: int) -> list[SchedulerOutput]:
    """Return `num_steps` consecutive decode steps of `num_requests` requests."""
    scheduler = start_decoding(num_requests, num_context_tokens, num_steps)
    steps = []
    for _ in range(num_steps):
        scheduled = scheduler.schedule()
        assert scheduled is not None
        scheduler.update_from_output(scheduled, sample_all(scheduled))
        steps.append(scheduled)
    return steps
