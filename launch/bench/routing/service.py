"""What the replicas of the simulation are like: as `cluster-bench steps` measured an engine, or as assumed. Pure.

Called by: the benchmark's command and its tests.
"""

from pathlib import Path

import msgspec

from ....cluster.step_cost import StepCost
from ..errors import BenchError
from ..steps import StepFit
from .replica import Service

ASSUMED = Service(
    cost=StepCost(base_s=6e-3, prefill_token_s=32e-6, decode_token_s=12e-6, context_token_s=0.033e-6),
    capacity_tokens=600_000,
    max_num_batched_tokens=2048,
    max_num_seqs=256,
    long_prefill_share=0.5,
)
"""Of the order of a model of 8 billion parameters on a card, and not measured: what is simulated unless --service
names a file. The limits of a step are the scheduler's defaults."""


class _StepsReport(msgspec.Struct, frozen=True):
    """The part of a report of `cluster-bench steps` that is needed here."""

    benchmark: str
    date: str
    runs: StepFit


def read_service(path: Path) -> tuple[Service, str]:
    """Read the JSON file that `cluster-bench steps --out` has written. Returns also where its numbers come from.

    Raises BenchError when it is no such file.
    """
    try:
        report = msgspec.json.decode(path.read_bytes(), type=_StepsReport)
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchError(f"--service: {path} is no result of cluster-bench steps: {error}") from None
    fit = report.runs
    service = Service(
        cost=fit.cost,
        capacity_tokens=fit.capacity_tokens,
        max_num_batched_tokens=fit.max_num_batched_tokens,
        max_num_seqs=fit.max_num_seqs,
        long_prefill_share=ASSUMED.long_prefill_share,
    )
    return service, f"{report.benchmark}, measured {report.date}"


def speed(service: Service) -> float:
    """How much faster than `ASSUMED` a service is, for a usual request: 1000 tokens, 200 of answer, 32 decoding."""

    def seconds(cost: StepCost) -> float:
        decode_s = cost.base_s / 32 + cost.decode_token_s + 1000 * cost.context_token_s
        return 1000 * cost.prefill_token_s + 200 * decode_s

    return seconds(ASSUMED.cost) / seconds(service.cost)


def describe(service: Service) -> str:
    """Say all of it in one sentence."""
    base, prefill, decode, context = (
        round(seconds * 1e6, 3)
        for seconds in (
            service.cost.base_s,
            service.cost.prefill_token_s,
            service.cost.decode_token_s,
            service.cost.context_token_s,
        )
    )
    return (
        f"a step takes {base} µs + {prefill} µs a prefill token + {decode} µs a decode token + {context} µs a token "
        f"of context; {service.capacity_tokens} tokens of KV cache; steps of at most "
        f"{service.max_num_batched_tokens} tokens and {service.max_num_seqs} requests"
    )
