"""A day's trace through the real scheduler in seconds: budgets, order, fairness, and nothing left at the end.

Lengths are log-normal and arrivals come in bursts, as in published traces of chat services; half of the prompts
begin with one of a few system prompts. The model answers any token at once, and a step takes as long as a simple
cost model says.
"""

import random
from collections import deque
from dataclasses import dataclass

import pytest

from phalanx.engine.messages import EngineCoreRequest
from phalanx.workers.messages import ModelRunnerOutput
from support.engine import make_request, make_scheduler
from support.step_outputs import write_out

STEP_S = 0.01
TOKEN_S = 0.00002
NUM_BLOCKS = 3000
BLOCK_SIZE = 16
MAX_NUM_SEQS = 128
BUDGET = 1024


@dataclass
class Fate:
    arrived_at: float
    num_tokens: int
    priority: int
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    num_received: int = 0


def make_trace(
    num_requests: int, seed: int, *, priorities: tuple[int, ...], load: float
) -> list[tuple[float, EngineCoreRequest]]:
    rng = random.Random(seed)
    system_prompts = [[rng.randrange(90) for _ in range(rng.randrange(50, 400))] for _ in range(5)]
    now, trace = 0.0, []
    for number in range(num_requests):
        # Bursts: most requests follow the one before closely.
        now += rng.expovariate(20 * load if rng.random() < 0.7 else 2 * load)
        prompt = [rng.randrange(90) for _ in range(max(1, min(3000, int(rng.lognormvariate(4.3, 1.1)))))]
        if rng.random() < 0.5:
            prompt = rng.choice(system_prompts) + prompt
        request = make_request(
            f"r{number}",
            prompt_token_ids=prompt,
            max_tokens=max(1, min(600, int(rng.lognormvariate(3.2, 0.9)))),
            priority=rng.choice(priorities),
        )
        trace.append((now, request))
    return trace


def simulate_trace(trace, *, depth, num_blocks=NUM_BLOCKS, **config):
    scheduler, kv = make_scheduler(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=8192,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BUDGET,
        max_num_waiting=len(trace),
        **config,
    )
    arrivals = deque(trace)
    fates, admissions, in_flight = {}, [], deque()
    now, num_steps = 0.0, 0
    while arrivals or scheduler.num_unfinished_requests or in_flight:
        while arrivals and arrivals[0][0] <= now:
            at, request = arrivals.popleft()
            params = request.sampling_params
            fates[request.request_id] = Fate(at, params.max_tokens, request.priority)
            assert scheduler.add_request(request) is None
        while len(in_flight) < depth and (step := scheduler.schedule()) is not None:
            num_steps += 1
            num_tokens = step.total_num_scheduled_tokens
            assert num_tokens <= BUDGET
            assert len(step.num_scheduled_tokens) <= MAX_NUM_SEQS
            for new in step.new_requests:
                if fates[new.request_id].first_scheduled_at is None:
                    fates[new.request_id].first_scheduled_at = now
                    admissions.append(new.request_id)
            in_flight.append((step, num_tokens))
            if num_steps % 500 == 0:
                scheduler.check_invariants()
        if not in_flight:
            now = arrivals[0][0]
            continue
        step, num_tokens = in_flight.popleft()
        now += STEP_S + TOKEN_S * num_tokens
        num_sampling = len(scheduler._in_flight[0][1])
        result = ModelRunnerOutput(step=step.step, request_ids=[], sampled_token_ids=[95] * num_sampling)
        for output in write_out(scheduler.update_from_output(step, result)):
            fate = fates[output.request_id]
            assert fate.finished_at is None
            fate.num_received += len(output.new_token_ids)
            fate.first_token_at = fate.first_token_at or now
            if output.finish_reason is not None:
                fate.finished_at = now
    scheduler.check_invariants()
    return scheduler, kv, fates, admissions


@pytest.mark.parametrize("depth", [2, pytest.param(1, marks=pytest.mark.full)])
def test_ten_thousand_requests_come_out_whole_in_order_and_leave_nothing(depth):
    trace = make_trace(10_000, seed=7, priorities=(0,), load=1.0)

    scheduler, kv, fates, admissions = simulate_trace(trace, depth=depth)

    assert admissions == [request.request_id for _, request in trace], "first come, first served"
    for fate in fates.values():
        assert fate.num_received == fate.num_tokens
        assert fate.finished_at is not None
    assert kv.num_free_blocks == NUM_BLOCKS - 1
    assert kv.usage == 0.0
    stats = scheduler.stats()
    assert stats.num_output_tokens_total == sum(fate.num_tokens for fate in fates.values())
    assert stats.prefix_hit_tokens > 0.1 * stats.prefix_queried_tokens
    assert scheduler.next_deadline_at is None
    scheduler.check_invariants()
    assert kv.reset_prefix_cache()


def test_under_pressure_nobody_who_decodes_waits_and_nobody_starves():
    trace = make_trace(1500, seed=3, priorities=(0, 0, 0, 5), load=20.0)

    scheduler, kv, fates, _ = simulate_trace(trace, depth=2, num_blocks=700, max_overtakes=8)

    assert scheduler.stats().num_preemptions > 0
    assert all(fate.num_received == fate.num_tokens for fate in fates.values())
    waits = {
        priority: sorted(
            f.first_scheduled_at - f.arrived_at for f in fates.values() if f.priority == priority
        )
        for priority in (0, 5)
    }
    # Who is more urgent waits less, and who is not is still served before all of the others are.
    assert waits[0][len(waits[0]) // 2] < waits[5][len(waits[5]) // 2]
    last_urgent = max(f.first_scheduled_at for f in fates.values() if f.priority == 0)
    patient = [f.first_scheduled_at for f in fates.values() if f.priority == 5]
    assert sum(at < last_urgent for at in patient) > 0.5 * len(patient)
    assert kv.usage == 0.0


def test_a_long_prompt_does_not_hold_up_those_behind_it():
    short = [
        (0.001 * i, make_request(f"s{i}", prompt_token_ids=[i % 90] * 30, max_tokens=5)) for i in range(20)
    ]
    long = (0.0, make_request("long", prompt_token_ids=[91] * 6000, max_tokens=5))

    _, _, fates, _ = simulate_trace([long, *short], depth=2, long_prefill_share=0.5)

    long_at = fates["long"].first_token_at
    assert all(fates[f"s{i}"].first_token_at < long_at for i in range(20))
