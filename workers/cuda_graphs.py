"""StepGraphs: steps of some sizes recorded once, and launched as a whole.

Called by: recorded_steps.py makes them, the model runner and forward_pass.py replay. A step of a small model is a few
hundred kernels of a few microseconds; launched one by one they would wait for the host. What is recorded is a function
of persistent tensors, so a replay reads what lies there then. The graphs share one pool of memory, the largest is
recorded first, and only one may run at a time: they are launched on one stream, and what one has put out is read before
the next is launched. Nothing here knows what a step is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch

Output = TypeVar("Output")

SMALL_SIZES = (1, 2, 4, 8)
STEP_TO_256, STEP_BEYOND = 8, 16
SMALLEST_PROMPTS, MANY_TOKENS = 16, 256


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of decoding rows worth a graph, ascending: 1, 2, 4, 8, every 8th up to 256, then every 16th, and all.

    A batch computes as many rows as the next larger graph has, so the sizes bound what is computed for nothing.
    """
    steps = [*SMALL_SIZES, *range(16, 257, STEP_TO_256), *range(272, max_num_seqs, STEP_BEYOND)]
    return (*(size for size in steps if size < max_num_seqs), max_num_seqs)


def prompt_sizes(max_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens worth a graph of a step with prompts, ascending: powers of two, one between any two large ones,
    and `max_tokens`; none where that is 0.

    Of few tokens twice as many cost nearly the same, for it is weights that are read; of many a third is computed for
    nothing or, at worst, half, and launched one by one the kernels of such a step would still take longer.
    """
    sizes: list[int] = []
    size = SMALLEST_PROMPTS
    while size < max_tokens:
        sizes.append(size)
        is_power = size & (size - 1) == 0
        size = size * 2 if size < MANY_TOKENS else size * 3 // 2 if is_power else size * 4 // 3
    return (*sizes, max_tokens) if max_tokens > 0 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph(Generic[Output]):
    graph: torch.cuda.CUDAGraph
    output: Output


class StepGraphs(Generic[Output]):
    """See the module. A size is what the caller means by it.

    load:    fills the persistent tensors with what is harmless to compute, for a size
    compute: does what is recorded, for a size; launches kernels only, on the current stream, and returns tensors
    """

    def __init__(
        self,
        load: Callable[[int], None],
        compute: Callable[[int], Output],
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        self._load = load
        self._compute = compute
        self._sizes = sorted(sizes)
        self._device = device
        self._graphs: dict[int, _Graph[Output]] = {}

    @property
    def sizes(self) -> Sequence[int]:
        """All sizes, ascending."""
        return self._sizes

    def capture(self, pool: Any, on_size: Callable[[], None] = lambda: None) -> None:
        """Record all sizes. pool: of `torch.cuda.graph_pool_handle`; on_size: told when another is done.

        Each size is computed once before it is recorded: what is compiled or allocated on the first call must not fall
        into a recording. Raises torch.OutOfMemoryError.
        """
        stream = _recording_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for size in reversed(self._sizes):
                self._load(size)
                self._compute(size)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                # Other threads of this process may use the device meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    output = self._compute(size)
                finally:
                    graph.capture_end()
                self._graphs[size] = _Graph(graph=graph, output=output)
                on_size()
        torch.cuda.current_stream(self._device).wait_stream(stream)

    def size_for(self, least: int) -> int | None:
        """The smallest recorded size that is at least so large; None: there is none."""
        return next((size for size in self._sizes if size >= least and size in self._graphs), None)

    def replay(self, size: int) -> Output:
        """Launch a size on the current stream; returns its output, which the next replay in this pool overwrites."""
        recorded = self._graphs[size]
        recorded.graph.replay()
        return recorded.output

    def close(self) -> None:
        """Give the recordings up. A process group of NCCL does not end while one holds its exchanges. Idempotent."""
        for recorded in self._graphs.values():
            recorded.graph.reset()
        self._graphs.clear()


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps 32 MiB for each stream that it has ever seen."""
    return torch.cuda.Stream(device)
