"""DecodeGraphs: a decode step recorded once for each of some batch sizes, and launched as a whole.

Called by: the model runner. A step of a small model is a few hundred kernels of a few microseconds; launched one by one
they would wait for the host. What is recorded is a function of persistent tensors, so a replay reads what lies there
then. The graphs share one pool of memory, the largest is recorded first, and only one may run at a time: they are
launched on one stream. Nothing here knows what a step is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

SMALL_SIZES = (1, 2, 4, 8)
STEP_TO_256, STEP_BEYOND = 8, 16


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes worth a graph, ascending: 1, 2, 4, 8, every 8th up to 256, then every 16th; the last one fits all.

    A batch computes as many rows as the next larger graph has, so the sizes bound what is computed for nothing.
    """
    steps = [*SMALL_SIZES, *range(16, 257, STEP_TO_256), *range(272, max_num_seqs, STEP_BEYOND)]
    return (*(size for size in steps if size < max_num_seqs), max_num_seqs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    output: torch.Tensor


class DecodeGraphs:
    """See the module.

    load:    fills the persistent tensors with what is harmless to compute, for a batch size
    compute: does what is recorded, for a batch size; launches kernels only, on the current stream, and returns a tensor
    """

    def __init__(
        self,
        load: Callable[[int], None],
        compute: Callable[[int], torch.Tensor],
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        self._load = load
        self._compute = compute
        self._sizes = sorted(sizes)
        self._device = device
        self._graphs: dict[int, _Graph] = {}

    def capture(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Record all sizes. on_progress: told how many of how many are done.

        Each size is computed once before it is recorded: what is compiled or allocated on the first call must not fall
        into a recording. Raises torch.OutOfMemoryError.
        """
        stream = _recording_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream):
            for done, size in enumerate(reversed(self._sizes)):
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
                on_progress(done + 1, len(self._sizes))
        torch.cuda.current_stream(self._device).wait_stream(stream)

    def size_for(self, num_rows: int) -> int | None:
        """The smallest recorded batch that holds so many rows; None: there is none."""
        return next((size for size in self._sizes if size >= num_rows and size in self._graphs), None)

    def replay(self, size: int) -> torch.Tensor:
        """Launch a batch size on the current stream; returns its output, which the next replay overwrites."""
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
