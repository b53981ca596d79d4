"""What a rank makes of the kernels that a profiler saw: which of them sum over the ranks, and what ran beside them."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType
from torch.profiler import profile

from phalanx.workers import symmetric_memory
from phalanx.workers.intervals import overlap, total, unite
from phalanx.workers.measured_worker import device_kernels
from phalanx.workers.nccl_group import NCCL_GATHER_KERNELS, NCCL_SUM_KERNELS
from phalanx.workers.step_measures import GATHER, Kernel, SumTime, sort_kernels

EXCHANGES = {
    "one-shot": ("_one_shot_kernel",),
    "two-shot": symmetric_memory.KERNEL_NAMES,
    "nccl": NCCL_SUM_KERNELS,
    GATHER: NCCL_GATHER_KERNELS,
}
TWO_SHOT = (
    "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>"
    "(c10::BFloat16**, unsigned long, unsigned long, unsigned int**, unsigned long, unsigned long)"
)
NCCL_SUM = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
NCCL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (min(pair), max(pair)))
)


def cells(some: list[tuple[int, int]]) -> set[int]:
    """The unit cells that intervals with whole ends cover."""
    return {cell for start, end in some for cell in range(start, end)}


@given(intervals)
def test_a_union_covers_what_its_parts_cover_and_ascends(some: list[tuple[int, int]]) -> None:
    united = unite(some)

    assert total(united) == len(cells(some))
    assert all(start < end for start, end in united)
    assert all(before[1] < after[0] for before, after in pairwise(united))


@given(intervals, st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_an_overlap_counts_every_covered_cell_once(
    some: list[tuple[int, int]], ends: tuple[int, int]
) -> None:
    one = (min(ends), max(ends))

    assert overlap(one, unite(some)) == len(cells(some) & cells([one]))


def test_kernels_of_every_way_are_told_by_their_names() -> None:
    times = sort_kernels(
        [
            Kernel("nvjet_tst_64x8_64x16_2x4_h_bz_TNT", 0.0, 10.0),
            Kernel(NCCL_SUM, 30.0, 42.0),
            Kernel("_one_shot_kernel", 8.0, 14.0),
            Kernel(TWO_SHOT, 20.0, 28.0),
            Kernel(NCCL_GATHER, 50.0, 53.0),
            # Two that run together beside the last of the two-shot sum.
            Kernel("void rms_norm<float>", 26.0, 30.0),
            Kernel("void silu<float>", 27.0, 29.0),
        ],
        EXCHANGES,
    )

    assert times.sums == [
        SumTime("one-shot", 6.0, 2.0),
        SumTime("two-shot", 8.0, 2.0),
        SumTime("nccl", 12.0, 0.0),
    ]
    assert times.gather_us == 3.0
    assert times.busy_us == 14.0 + 22.0 + 3.0


def test_of_a_profile_only_kernels_on_the_device_count() -> None:
    def event(name: str, device_type: DeviceType, *, is_user_annotation: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            device_type=device_type,
            is_user_annotation=is_user_annotation,
            time_range=SimpleNamespace(start=1.0, end=3.0),
        )

    recorder = SimpleNamespace(
        events=lambda: [
            event("cudaGraphLaunch", DeviceType.CPU),
            event("Memcpy DtoH (Device -> Pinned)", DeviceType.CUDA),
            event("Memset (Device)", DeviceType.CUDA),
            event("ProfilerStep*", DeviceType.CUDA, is_user_annotation=True),
            event(NCCL_SUM, DeviceType.CUDA),
        ]
    )

    assert device_kernels(cast(profile, cast(Any, recorder))) == [Kernel(NCCL_SUM, 1.0, 3.0)]
