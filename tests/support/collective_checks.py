"""The hook "check_sums": sums and gathers over ranks with a GPU each, bit for bit, launched one by one and in graphs.

Named in `executor.hooks`; runs on every rank at the same time.
"""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch

if TYPE_CHECKING:
    from phalanx.workers.worker import Worker

HOOK = "support.collective_checks:check_sums"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SumsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in elements; each rank takes them in this order, again and again."""

    num_elements: list[int]
    num_rounds: int


class SumsReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank found.

    has_graphs:   its decode steps are recorded
    has_one_shot: short sums go through the kernel of our own
    faults:       what came out wrong
    bits:         digest of all results, to compare between the ranks
    """

    group: str
    has_graphs: bool
    has_one_shot: bool
    num_checked: int
    faults: list[str]
    bits: str


def check_sums(worker: "Worker", argument: SumsPlan) -> SumsReport:
    with torch.inference_mode():
        check = _Check(worker)
        for round_number in range(argument.num_rounds):
            for dtype in DTYPES:
                for size in argument.num_elements:
                    check.sum_of(size, dtype, round_number)
        for dtype in DTYPES:
            check.graph_of(argument.num_elements, dtype, argument.num_rounds)
        torch.cuda.synchronize(worker.device)
        return check.report()


class _Check:
    def __init__(self, worker: "Worker") -> None:
        self._group = worker.group
        self._device = worker.device
        runner = worker._runner
        self._has_graphs = runner is not None and runner._recorded is not None
        self._one_shot_bytes = getattr(self._group, "_one_shot_max_bytes", 0)
        self._faults: list[str] = []
        self._num_checked = 0
        self._digest = hashlib.sha256()

    def report(self) -> SumsReport:
        return SumsReport(
            group=self._group.name,
            has_graphs=self._has_graphs,
            has_one_shot=self._one_shot_bytes > 0,
            num_checked=self._num_checked,
            faults=self._faults[:20],
            bits=self._digest.hexdigest(),
        )

    def sum_of(self, size: int, dtype: torch.dtype, seed: int) -> None:
        """One sum, launched alone."""
        parts = self._parts(size, dtype, seed)
        own = parts[self._group.rank].to(self._device)
        self._compare(f"sum of {size} {dtype}, round {seed}", self._group.all_reduce(own), parts)

    def graph_of(self, sizes: list[int], dtype: torch.dtype, num_replays: int) -> None:
        """All sums and a gather in one graph, replayed over new numbers, with other sums between the replays."""
        inputs = [torch.zeros(size, dtype=dtype, device=self._device) for size in sizes]
        columns = torch.zeros((3, 8), dtype=dtype, device=self._device)

        def compute() -> list[torch.Tensor]:
            sums = [self._group.all_reduce(x.clone()) for x in inputs]
            return [*sums, self._group.all_gather_last_dim(columns, [8] * self._group.size)]

        replay, outputs = self._record(compute)
        for seed in range(1000, 1000 + num_replays):
            parts = [self._parts(size, dtype, seed) for size in sizes]
            for x, of_ranks in zip(inputs, parts, strict=True):
                x.copy_(of_ranks[self._group.rank])
            columns.fill_(seed % 7 + self._group.rank)
            replay()
            for size, output, of_ranks in zip(sizes, outputs, parts, strict=False):
                self._compare(f"sum of {size} {dtype} in a graph, replay {seed}", output, of_ranks)
            for rank, part in enumerate(outputs[-1].split(8, dim=-1)):
                if not bool((part == seed % 7 + rank).all()):
                    self._faults.append(f"gather of {dtype} in a graph, replay {seed}: part {rank}")
            self.sum_of(sizes[seed % len(sizes)], dtype, seed)

    def _record(
        self, compute: Callable[[], list[torch.Tensor]]
    ) -> tuple[Callable[[], None], list[torch.Tensor]]:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            compute()
            stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            outputs = compute()
            graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return graph.replay, outputs

    def _parts(self, size: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
        """What every rank adds: the same numbers on all of them."""
        generator = torch.Generator().manual_seed(1_000_003 * seed + size)
        return [torch.randn(size, generator=generator).to(dtype) for _ in range(self._group.size)]

    def _compare(self, what: str, result: torch.Tensor, parts: list[torch.Tensor]) -> None:
        made = result.cpu()
        self._digest.update(made.view(torch.uint8).numpy().tobytes())
        self._num_checked += 1
        exact = torch.zeros(parts[0].shape, dtype=torch.float32)
        for part in parts:
            exact += part.float()
        if made.nbytes <= self._one_shot_bytes:
            is_right = torch.equal(made, exact.to(made.dtype))
        else:
            # NCCL adds in an order of its own, and rounds on the way.
            is_right = torch.allclose(made.float(), exact, rtol=2e-2, atol=2e-2)
        if not is_right:
            self._faults.append(f"{what}: off by {float((made.float() - exact).abs().max())}")
