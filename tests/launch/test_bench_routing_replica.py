"""A simulated replica finds in its cache what a real one would: what is computed, or planned, and nothing more."""

from phalanx.launch.bench.routing.load import SimRequest, number_key
from phalanx.launch.bench.routing.replica import Job, Replica, Service
from phalanx.launch.bench.routing.service import ASSUMED

BLOCK_TOKENS = 64
SERVICE = Service(
    cost=ASSUMED.cost,
    capacity_tokens=100 * BLOCK_TOKENS,
    max_num_batched_tokens=16 * BLOCK_TOKENS,
    max_num_seqs=8,
    long_prefill_share=0.5,
)


def make_job(name: str, num_blocks: int, *, number: int, own: int = 0) -> Job:
    """A prompt of the blocks that all share, of some of its own, and of one token more."""
    keys = tuple(number_key(block) for block in range(num_blocks))
    keys += tuple(number_key(1000 * number + block) for block in range(own))
    request = SimRequest(
        request_id=name,
        num_prompt_tokens=len(keys) * BLOCK_TOKENS + 1,
        num_output_tokens=2,
        keys=keys,
        num_prompt_blocks=len(keys),
    )
    return Job(request, 0, 0.0, number)


def run(replica: Replica) -> float:
    """Let it come to rest; returns when."""
    now = 0.0
    while (ends_at := replica.begin(now)) is not None:
        now = ends_at
        replica.end(now)
    return now


def test_who_comes_later_finds_the_whole_prompt() -> None:
    replica = Replica(0, SERVICE, BLOCK_TOKENS)
    first, second = make_job("a", 20, number=1), make_job("b", 20, number=2, own=3)
    replica.add(first)
    run(replica)

    replica.add(second)
    run(replica)

    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 20 * BLOCK_TOKENS)
    assert replica.hit_tokens == 20 * BLOCK_TOKENS


def test_who_comes_at_the_same_time_finds_the_part_that_is_planned() -> None:
    replica = Replica(0, SERVICE, BLOCK_TOKENS)
    jobs = [make_job("a", 40, number=1), make_job("b", 40, number=2)]
    for job in jobs:
        replica.add(job)

    run(replica)

    # Half a step's tokens: as much as one prompt may take of the first step while another waits.
    assert [job.num_cached_tokens for job in jobs] == [0, 8 * BLOCK_TOKENS]
    assert replica.num_prefill_tokens == sum(job.request.num_prompt_tokens for job in jobs) - 8 * BLOCK_TOKENS
    stats = replica.stats(1.0)
    assert (stats.kv_usage, stats.num_free_tokens) == (0.0, SERVICE.capacity_tokens)


def test_its_time_is_that_of_what_it_reports() -> None:
    replica = Replica(0, SERVICE, BLOCK_TOKENS)
    for number in (1, 2, 3):
        replica.add(make_job(f"{number}", 30, number=number, own=number))

    ended_at = run(replica)

    stats, cost = replica.stats(ended_at), SERVICE.cost
    # The token that a prompt brings with it is an output token as well, and takes no time of its own here.
    decoded = stats.num_output_tokens_total - 3
    expected = (
        stats.num_steps * cost.base_s
        + stats.num_prefill_tokens_total * cost.prefill_token_s
        + decoded * cost.decode_token_s
        + stats.num_context_tokens_total * cost.context_token_s
    )
    assert abs(stats.busy_s - expected) < 1e-6
    assert stats.busy_s == ended_at
