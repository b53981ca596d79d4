"""From the host to a GPU's parameters by several threads, each through pinned memory and a stream of its own.

Called by: weights.py, while a checkpoint is loaded. One thread alone would spend its time on page faults of the mapped
files, and the copy engine would wait; several together reach what the page cache or the disk gives.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

NUM_THREADS = 8
STAGING_BYTES = 16 << 20
"""Of one of the two pinned buffers of a thread: one is filled while the other travels."""


def upload_all(
    tensors: Iterable[tuple[torch.Tensor, Callable[[], torch.Tensor]]], device: torch.device
) -> None:
    """Fill every target on `device` with what its function reads on the CPU, of the same shape and any dtype.

    The functions are called from several threads, and so may wait for a disk. All is there when this returns.
    Raises whatever a function raises, once the others under way are done.
    """
    local = threading.local()

    def upload(target: torch.Tensor, read: Callable[[], torch.Tensor]) -> None:
        if not hasattr(local, "stage"):
            torch.cuda.set_device(device)
            local.stage = _Stage(device)
        local.stage.copy(target, read())

    # What was allocated or zeroed on the default stream must be there before other streams write.
    torch.cuda.synchronize(device)
    with torch.inference_mode(), ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="upload") as pool:
        futures = [pool.submit(upload, target, read) for target, read in tensors]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
    torch.cuda.synchronize(device)


def chunks(shape: torch.Size, element_bytes: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a tensor along its first dimension: (first row, rows) of pieces of at most `max_bytes`, or of one row."""
    num_rows = shape[0]
    row_bytes = max(1, shape[1:].numel() * element_bytes)
    rows_at_once = max(1, max_bytes // row_bytes)
    for first in range(0, num_rows, rows_at_once):
        yield first, min(rows_at_once, num_rows - first)


class _Stage:
    """The stream and the two pinned buffers of one thread."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._next = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy; the source is no longer read when this returns, the target is filled later."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for first, num_rows in chunks(source.shape, source.element_size(), STAGING_BYTES):
                part = source.narrow(0, first, num_rows)
                if part.nbytes > STAGING_BYTES:
                    target.narrow(0, first, num_rows).copy_(part)
                    continue
                number, self._next = self._next, 1 - self._next
                sent = self._sent[number]
                if sent is not None:
                    sent.synchronize()
                pinned = self._buffers[number][: part.nbytes].view(part.dtype).view(part.shape)
                pinned.copy_(part)
                target.narrow(0, first, num_rows).copy_(pinned, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._stream)
                self._sent[number] = event
