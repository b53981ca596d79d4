"""Channel: typed frames through a ring.

Called by: the executor and the workers; each end by one thread. A sender stamps epoch and rank; a receiver gets
decoded frames and decides by their header. `CallSequence` is the check for requests: a worker that skips a step
which its peers run would leave them in a collective for ever, so the wrong request must end it instead.

When the peer dies: as the ring (QueueClosedError).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from .codec import Frame, FrameDecoder, FrameEncoder, FrameHeader, FrameKind
from .errors import ProtocolError
from .ring_buffer import RingReader, RingWriter

T = TypeVar("T")

EXECUTOR_RANK = -1


class Sender:
    """Writes frames of one epoch and rank into `ring`, and owns it."""

    def __init__(self, ring: RingWriter, *, epoch: int, rank: int) -> None:
        self.ring = ring
        self._epoch = epoch
        self._rank = rank
        self._encoder = FrameEncoder()

    def send(
        self,
        kind: FrameKind,
        call_id: int,
        message: object,
        buffers: Sequence[bytes | memoryview] = (),
        *,
        deadline_at: float | None = None,
    ) -> None:
        """Publish one frame. Blocks until there is room, at most until `deadline_at` (None: not at all).

        Raises ProtocolError when the message cannot be encoded, else as `RingWriter.write`.
        """
        header = FrameHeader(epoch=self._epoch, call_id=call_id, rank=self._rank, kind=kind)
        self.ring.write(*self._encoder.encode(header, message, buffers), deadline_at=deadline_at)

    def close(self) -> None:
        """Close the ring's writing end. Idempotent."""
        self.ring.close()


class Receiver(Generic[T]):
    """Reads frames from `ring`, and owns it. types: as `FrameDecoder`."""

    def __init__(self, ring: RingReader, types: Mapping[FrameKind, Any]) -> None:
        self.ring = ring
        self._decoder = FrameDecoder[T](types)

    @contextmanager
    def receive(self, *, deadline_at: float | None = None) -> Iterator[Frame[T]]:
        """Give the next frame; its buffers live until the end of the block.

        Blocks until `deadline_at` (None: not at all). Raises ProtocolError for a frame that does not decode
        (it is consumed), else as `RingReader.read`.
        """
        with self.ring.read(deadline_at=deadline_at) as view:
            frame = self._decoder.decode(view)
            try:
                yield frame
            finally:
                for buffer in frame.buffers:
                    buffer.release()

    def close(self) -> None:
        """Close the ring's reading end. Idempotent."""
        self.ring.close()


class CallSequence:
    """The requests that a worker may meet: of one epoch, with consecutive call ids from 1."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_call_id = 1

    def accept(self, header: FrameHeader) -> None:
        """Count one request. Raises ProtocolError when it must not come now."""
        if header.kind is not FrameKind.REQUEST or header.epoch != self._epoch:
            raise ProtocolError(f"{header} came in epoch {self._epoch}")
        if header.call_id != self._next_call_id:
            raise ProtocolError(f"call {header.call_id} came when call {self._next_call_id} was due")
        self._next_call_id += 1
