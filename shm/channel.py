"""Channel: typed frames through a ring, and beside it when they are too large for it.

Called by: the executor and the workers; each end by one thread. A sender stamps epoch and rank; a receiver gets
decoded frames and decides by their header. A frame above the ring's limit takes the way of oversize.py, when the
sender was given limits for that; nobody has to know which way a frame came. `CallSequence` is the check for requests: a
worker that skips a step which its peers run would leave them in a collective for ever, so the wrong request must end
it instead.

When the peer dies: as the ring (QueueClosedError).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from .codec import Frame, FrameDecoder, FrameEncoder, FrameHeader, FrameKind
from .errors import MessageTooLargeError, ProtocolError
from .oversize import OversizeLimits, OversizeReceiver, OversizeSender, Ticket
from .ring_buffer import RingReader, RingWriter

T = TypeVar("T")

EXECUTOR_RANK = -1


class Sender:
    """Writes frames of one epoch and rank into `ring`, and owns it.

    oversize: what may be under way beside the ring; None: a frame above the ring's limit is an error
    folder:   for the sockets of those; as `OversizeSender`
    """

    def __init__(
        self,
        ring: RingWriter,
        *,
        epoch: int,
        rank: int,
        oversize: OversizeLimits | None = None,
        folder: Path | None = None,
    ) -> None:
        self.ring = ring
        self._encoder = FrameEncoder(epoch=epoch, rank=rank)
        self._oversize = OversizeSender(ring, oversize, folder) if oversize is not None else None

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

        Raises ProtocolError when the message cannot be encoded, else as `RingWriter.write`. A frame above the limit
        of the ring may take the readers longer; MessageTooLargeError when it is above the limit for those, too.
        """
        pieces: Sequence[bytes | memoryview]
        try:
            if buffers:
                pieces = self._encoder.encode(kind, call_id, message, buffers)
                self.ring.write(*pieces, deadline_at=deadline_at)
            else:
                record = self._encoder.encode_message(kind, call_id, message)
                pieces = (record,)
                self.ring.write_bytes(record, deadline_at)
        except MessageTooLargeError as error:
            if self._oversize is None:
                raise
            ticket = self._oversize.wait_room(error.num_bytes, deadline_at)
            record = self._encoder.encode_message(FrameKind.TICKET, call_id, ticket)
            self._oversize.send(ticket, record, pieces, deadline_at)

    def close(self) -> None:
        """Close the ring's writing end; waits shortly for readers of what went beside it. Idempotent."""
        if self._oversize is not None:
            self._oversize.close()
        self.ring.close()


class Receiver(Generic[T]):
    """Reads frames from `ring`, and owns it. types: as `FrameDecoder`."""

    def __init__(self, ring: RingReader, types: Mapping[FrameKind, Any]) -> None:
        self.ring = ring
        self._decode = FrameDecoder[Any]({**types, FrameKind.TICKET: Ticket}).decode
        self._payload_decoder = FrameDecoder[T](types)
        self._oversize = OversizeReceiver(ring)
        # One for all: a channel gives one frame at a time.
        self._receiving = Receiving(self)

    def receive(self, *, deadline_at: float | None = None) -> "Receiving[T]":
        """Give the next frame to a `with` block; its buffers live until the end of the block.

        Entering blocks until `deadline_at` (None: not at all, or for what is on its way beside the ring). Raises
        ProtocolError for a frame that does not decode (it is consumed), else as `RingReader.acquire`; after
        QueueTimeoutError the same frame comes again.
        """
        self._receiving._deadline_at = deadline_at
        return self._receiving

    def take(self, *, deadline_at: float | None = None) -> Frame[T]:
        """Return the next frame, without its buffers. Blocks and raises as `receive`."""
        ring = self.ring
        start, end = ring.locate(deadline_at)
        try:
            frame: Frame[Any] = self._decode(ring.data, start, end, has_buffers=False)
        except ProtocolError:
            ring.release()
            raise
        except BaseException:
            ring.put_back()
            raise
        if isinstance(frame.message, Ticket):
            ring.put_back()
            with self.receive(deadline_at=deadline_at) as frame:
                return Frame(frame.epoch, frame.call_id, frame.rank, frame.kind, frame.message, ())
        ring.release()
        return frame

    def close(self) -> None:
        """Close the ring's reading end. Idempotent."""
        self._oversize.close()
        self.ring.close()


class Receiving(Generic[T]):
    """The receipt of one frame in a `with` block. Used by `Receiver.receive`."""

    __slots__ = ("_buffers", "_data", "_deadline_at", "_decode", "_payload", "_receiver", "_ring")

    def __init__(self, receiver: Receiver[T]) -> None:
        self._receiver = receiver
        self._ring = receiver.ring
        self._data = receiver.ring.data
        self._decode = receiver._decode
        self._deadline_at: float | None = None
        self._payload: memoryview | None = None
        self._buffers: tuple[memoryview, ...] = ()

    def __enter__(self) -> Frame[T]:
        start, end = self._ring.locate(self._deadline_at)
        try:
            frame: Frame[T] = self._decode(self._data, start, end)
            if isinstance(frame.message, Ticket):
                frame = self._take_payload(frame.message)
        except ProtocolError:
            self._release()
            raise
        except BaseException:
            self._ring.put_back()
            raise
        self._buffers = frame.buffers
        return frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for buffer in self._buffers:
            buffer.release()
        self._buffers = ()
        if self._payload is None:
            self._ring.release()
        else:
            self._release()

    def _take_payload(self, ticket: Ticket) -> Frame[T]:
        payload = self._receiver._oversize.receive(ticket, self._deadline_at)
        self._payload = memoryview(payload.buffer).toreadonly()
        return self._receiver._payload_decoder.decode(self._payload)

    def _release(self) -> None:
        if self._payload is not None:
            self._payload.release()
            self._payload = None
        self._ring.release()


class CallSequence:
    """The requests that a worker may meet: of one epoch, with consecutive call ids from 1."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_call_id = 1

    def accept(self, header: FrameHeader) -> None:
        """Count one request. Raises ProtocolError when it must not come now."""
        if header.kind is not FrameKind.REQUEST or header.epoch != self._epoch:
            raise ProtocolError(f"a {header.kind.name} of epoch {header.epoch} came in epoch {self._epoch}")
        if header.call_id != self._next_call_id:
            raise ProtocolError(f"call {header.call_id} came when call {self._next_call_id} was due")
        self._next_call_id += 1
