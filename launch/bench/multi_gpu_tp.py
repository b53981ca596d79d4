"""One tensor parallel width, offline: the tokens that it makes, and what its sums over the ranks cost.

Called by: multi_gpu.py, in its process. Raises ConfigError, ProcessError.
"""

from collections.abc import Sequence

import msgspec

from ...engine.llm import LLM
from ...workers.sampling_params import SamplingParams
from .errors import BenchError
from .offline_workload import OfflineWorkload

HOOK = "phalanx.workers.collective_timing:time_all_reduce"
SUMS_TIMEOUT_S = 90.0
"""For all ways and sizes: seconds, if nothing hangs."""


class RankTiming(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of one way at one length; as AllReduceTiming of workers/collective_timing.py."""

    way: str
    num_bytes: int
    us: float | None
    is_exact: bool
    bits: str
    problem: str


class AllReduceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One way to sum over `width` ranks, at one length: the slowest rank's time; what holds for all ranks."""

    width: int
    way: str
    num_bytes: int
    us: float | None
    is_exact: bool
    has_equal_bits: bool
    problem: str


def greedy_tokens_and_sums(
    model: str, width: int, workload: OfflineWorkload, *, device: str, sizes: Sequence[int]
) -> tuple[list[list[int]], list[AllReduceRow]]:
    """Run `workload` greedily in float32 on `width` ranks; then time sums, when there are several.

    Returns the token ids of each request, and a row for each way and size.
    """
    llm = LLM(
        model,
        tensor_parallel_size=width,
        dtype="float32",
        device=device,
        skip_tokenizer_init=True,
        hooks=(HOOK,),
        max_model_len=workload.max_len,
    )
    with llm:
        params = [
            SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in workload.output_lens
        ]
        outputs = llm.generate(workload.prompts, params, show_progress=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        if width == 1:
            return tokens, []
        rows = _time_sums(llm, width, sizes, is_own=True)
        try:
            rows += _time_sums(llm, width, sizes, is_own=False)
        except BenchError as error:
            # To compare with; what is ours is measured.
            rows.append(
                AllReduceRow(
                    width=width,
                    way="others",
                    num_bytes=sizes[0],
                    us=None,
                    is_exact=False,
                    has_equal_bits=False,
                    problem=str(error),
                )
            )
    return tokens, rows


def _time_sums(llm: LLM, width: int, sizes: Sequence[int], *, is_own: bool) -> list[AllReduceRow]:
    """Time the sums over the ranks. Raises BenchError when a rank has failed, or does not answer."""
    by_rank = []
    for outcome in llm.collective_rpc(
        "time_all_reduce",
        {"sizes": list(sizes), "is_own": is_own},
        result_type=list[RankTiming],
        timeout_s=SUMS_TIMEOUT_S,
    ):
        if outcome.result is None:
            raise BenchError(f"the sums of rank {outcome.tp_rank} were not timed: {outcome.error}")
        by_rank.append(outcome.result)
    return [_merge(width, ranks) for ranks in zip(*by_rank, strict=True)]


def _merge(width: int, ranks: Sequence[RankTiming]) -> AllReduceRow:
    """Put together what all ranks say of the same sums."""
    times = [rank.us for rank in ranks if rank.us is not None]
    return AllReduceRow(
        width=width,
        way=ranks[0].way,
        num_bytes=ranks[0].num_bytes,
        us=max(times) if len(times) == len(ranks) else None,
        is_exact=all(rank.is_exact for rank in ranks),
        has_equal_bits=len({rank.bits for rank in ranks}) == 1,
        problem="; ".join(dict.fromkeys(rank.problem for rank in ranks if rank.problem)),
    )
