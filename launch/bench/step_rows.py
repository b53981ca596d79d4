"""What all ranks and the engine core measured of the same steps, put together: sums, and the executor's share. Pure.

Called by: multi_gpu_steps.py. A sum's time on one rank holds the wait for the rank that came last; the shortest time
over the ranks is that of the last one, which waited for nobody: what the sum itself costs. So beside the mean over the
ranks stands, sum by sum, the least.
"""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from ...workers.step_measures import RankMeasures, StepTimes
from .stats import Summary, summarize
from .timed_executor import SentStep

NUM_SKIPPED = 2
"""Steps at the beginning of each measurement: caches and profilers come to work in them."""


class WaySums(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of a step that took one way: how many, and their µs: over the ranks the mean, and the least."""

    num_sums: float
    us: float
    least_us: float


class SumRow(msgspec.Struct, frozen=True, kw_only=True):
    """The sums over the ranks in a step, at one width and load; medians over the steps, in µs.

    kind:       "decode", or what prompts the step has
    num_tokens: of a step, prompts included
    us:         of all sums of a step, mean over the ranks; least_us: of the rank that waited least, sum by sum
    layer_us:   us for each layer of the model, what precedes the layers included
    overlap:    part of the sums' time while other kernels ran on the same device, over all steps and ranks
    gather_us:  other exchanges, mean over the steps and the ranks
    busy_us:    the device computed or exchanged, mean over the steps and the ranks
    problem:    why there are no numbers
    """

    width: int
    num_requests: int
    kind: str
    num_steps: int = 0
    num_tokens: float = 0.0
    num_sums: int = 0
    us: float = 0.0
    least_us: float = 0.0
    layer_us: float = 0.0
    overlap: float = 0.0
    ways: dict[str, WaySums] = {}
    gather_us: float = 0.0
    busy_us: float = 0.0
    problem: str = ""


class HostShare(msgspec.Struct, frozen=True, kw_only=True):
    """What decode steps cost beside the ranks' own work, when each is waited for; µs.

    send:     from the submission until the step stands in the ring and the ranks are woken
    reach:    from the submission until the last rank has decoded it
    reply:    from rank 0 having the tokens until the engine core has them
    overhead: from the submission to the answer, without rank 0's own time: first to last of all above
    step:     from one submission to the next
    """

    num_steps: int
    send: Summary
    reach: Summary
    reply: Summary
    overhead: Summary
    step: Summary


class HostRow(msgspec.Struct, frozen=True, kw_only=True):
    """The executor's share of a decode step at one width and load, and how much of it the device hides; µs.

    alone:       steps one by one
    encode, decode: of the same frames, again in the benchmark's process
    step_us:     with as many steps in flight as the engine has, from one answer to the next
    device_us:   of it, from the first kernel of a step until its last, mean over the ranks
    idle_us:     of it, the device had nothing to do, mean over the ranks
    hidden:      part of what a step takes beside the device when it is alone that is gone with more in flight;
                 None when nothing is
    """

    width: int
    num_requests: int
    alone: HostShare
    encode: Summary
    decode: Summary
    step_us: Summary
    device_us: Summary
    idle_us: Summary
    hidden: float | None


def sum_row(
    ranks: Sequence[RankMeasures],
    sent: Mapping[int, SentStep],
    *,
    num_requests: int,
    kind: str,
    has_prompts: bool,
    num_layers: int,
) -> SumRow:
    """Put the sums of one measurement together. has_prompts: of which steps. ranks: by tp_rank.

    In every step of a model there are equally many sums, in the same order on all ranks.
    """
    blank = SumRow(width=len(ranks), num_requests=num_requests, kind=kind)
    numbers = [step.step for step in ranks[0].steps]
    wanted = [
        place
        for place, number in enumerate(numbers)
        if place >= NUM_SKIPPED and (sent[number].num_prompt_tokens > 0) == has_prompts
    ]
    if not wanted:
        return msgspec.structs.replace(blank, problem="no such step was measured")
    counts = {len(rank.sums) for rank in ranks}
    if len(counts) != 1 or len(ranks[0].sums) % len(numbers):
        shown = ", ".join(str(count) for count in sorted(counts))
        return msgspec.structs.replace(blank, problem=f"{shown} sums were seen in {len(numbers)} steps")
    num_sums = len(ranks[0].sums) // len(numbers)
    if len(ranks) > 1 and num_sums == 0:
        return msgspec.structs.replace(blank, problem="no sum was seen")
    places = [range(place * num_sums, (place + 1) * num_sums) for place in wanted]
    per_rank = [rank.sums for rank in ranks]
    means = [[statistics.fmean(sums[at].us for sums in per_rank) for at in step] for step in places]
    least = [[min(sums[at].us for sums in per_rank) for at in step] for step in places]
    summing_us = sum(sums[at].us for sums in per_rank for step in places for at in step)
    beside_us = sum(sums[at].overlapped_us for sums in per_rank for step in places for at in step)
    us = statistics.median(map(sum, means))
    return msgspec.structs.replace(
        blank,
        num_steps=len(wanted),
        num_tokens=statistics.median(sent[numbers[place]].num_tokens for place in wanted),
        num_sums=num_sums,
        us=us,
        least_us=statistics.median(map(sum, least)),
        layer_us=us / num_layers,
        overlap=beside_us / summing_us if summing_us else 0.0,
        ways=_by_way([[ranks[0].sums[at].way for at in step] for step in places], means, least),
        gather_us=statistics.fmean(rank.gather_us for rank in ranks) / len(numbers),
        busy_us=statistics.fmean(rank.busy_us or 0.0 for rank in ranks) / len(numbers),
    )


def host_share(ranks: Sequence[RankMeasures], sent: Mapping[int, SentStep]) -> HostShare:
    """Say what steps that were waited for one by one cost beside the ranks. ranks: by tp_rank."""
    steps = [(sent[step.step], step) for step in ranks[0].steps][NUM_SKIPPED:]
    received: dict[int, float] = {}
    for rank in ranks:
        for step in rank.steps:
            received[step.step] = max(received.get(step.step, 0.0), step.received_at)
    starts = [ours.submitted_at for ours, _ in steps]
    return HostShare(
        num_steps=len(steps),
        send=summarize(1e6 * (ours.published_at - ours.submitted_at) for ours, _ in steps),
        reach=summarize(1e6 * (received[ours.step] - ours.submitted_at) for ours, _ in steps),
        reply=summarize(1e6 * (ours.answered_at - theirs.done_at) for ours, theirs in steps),
        overhead=summarize(1e6 * _overhead_s(ours, theirs) for ours, theirs in steps),
        step=summarize(1e6 * (later - earlier) for earlier, later in pairwise(starts)),
    )


def host_row(
    alone: HostShare,
    ranks: Sequence[RankMeasures],
    sent: Mapping[int, SentStep],
    *,
    num_requests: int,
    encode: Summary,
    decode: Summary,
) -> HostRow:
    """Put what steps cost one by one beside what they cost with more in flight. ranks: of the latter, by tp_rank."""
    numbers = [step.step for step in ranks[0].steps][NUM_SKIPPED:]
    # Steps that were begun last may not have been asked for when the measurement ended.
    answered = [at for number in numbers if (at := sent[number].answered_at)]
    step_us = summarize(1e6 * (later - earlier) for earlier, later in pairwise(answered))
    by_step = list(zip(*(rank.steps[NUM_SKIPPED:] for rank in ranks), strict=True))
    device_us = summarize(statistics.fmean(step.device_us for step in steps) for steps in by_step)
    beside_us = alone.step.p50 - device_us.p50
    left_us = max(0.0, step_us.p50 - device_us.p50)
    return HostRow(
        width=len(ranks),
        num_requests=num_requests,
        alone=alone,
        encode=encode,
        decode=decode,
        step_us=step_us,
        device_us=device_us,
        idle_us=summarize(statistics.fmean(step.idle_us or 0.0 for step in steps) for steps in by_step),
        hidden=max(0.0, 1.0 - left_us / beside_us) if beside_us > 0 else None,
    )


def _overhead_s(ours: SentStep, theirs: StepTimes) -> float:
    return (ours.answered_at - ours.submitted_at) - (theirs.done_at - theirs.received_at)


def _by_way(
    ways: Sequence[Sequence[str]], means: Sequence[Sequence[float]], least: Sequence[Sequence[float]]
) -> dict[str, WaySums]:
    """Split the sums by the way that they took: what a step has of each, mean over the steps."""
    num_steps = len(ways)
    found: dict[str, WaySums] = {}
    for way in dict.fromkeys(one for step in ways for one in step):
        own = [
            (us, least_us)
            for step in zip(ways, means, least, strict=True)
            for one, us, least_us in zip(*step, strict=True)
            if one == way
        ]
        found[way] = WaySums(
            num_sums=len(own) / num_steps,
            us=sum(us for us, _ in own) / num_steps,
            least_us=sum(least_us for _, least_us in own) / num_steps,
        )
    return found
