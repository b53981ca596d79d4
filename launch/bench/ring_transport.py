"""Our ring as a transport of the ring benchmark: typed frames out over one ring, answers back over one each.

Called by: ring.py, one thread. The pieces are those of the executor (shm/channel.py over shm/ring_buffer.py).
When a reader dies: a wait ends within a second with QueueClosedError.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import msgspec

from ...shm.channel import EXECUTOR_RANK, Receiver, Sender
from ...shm.codec import FrameKind
from ...shm.process import ChildProcess, ChildSpec, Spawner, wait_all_ready
from ...shm.ring_buffer import RingReader, RingWriter, create_ring
from .ring_reader import TARGET, Ping, Pong, ReaderArgs

REQUEST_RING_BYTES = 33 << 20
"""Takes a record of 16 MiB, which is at most half of the ring: the executor's 32 MiB, and a little."""
REPLY_RING_BYTES = 1 << 16
START_TIMEOUT_S = 60.0
REPLY_TIMEOUT_S = 30.0


class RingTransport:
    """See turn.Transport. A context manager: entering starts the readers, leaving ends them."""

    def __init__(self, num_readers: int) -> None:
        self._num_readers = num_readers
        self._children: list[ChildProcess] = []
        self._receivers: list[Receiver[Pong]] = []
        self._sender: Sender | None = None
        self._num_sent = 0
        self._resources = ExitStack()

    @property
    def reader_pids(self) -> Sequence[int]:
        """Process ids of the readers."""
        return [child.pid for child in self._children]

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def round_trip(self, payload: bytes) -> list[int]:
        """Send one frame with `payload` beside it; gather an answer from each reader. Raises TransportError."""
        assert self._sender is not None, "enter first"
        self._num_sent += 1
        deadline_at = time.monotonic() + REPLY_TIMEOUT_S
        self._sender.send(
            FrameKind.REQUEST, self._num_sent, Ping(self._num_sent), (payload,), deadline_at=deadline_at
        )
        instants = []
        for receiver in self._receivers:
            frame = receiver.take(deadline_at=deadline_at)
            assert frame.call_id == self._num_sent, "an answer to another frame"
            instants.append(frame.message.received_ns)
        return instants

    def _start(self) -> None:
        spawner = Spawner("bench")
        spawner.start()
        self._resources.callback(spawner.close)
        self._resources.callback(self._end_children)
        requests = create_ring("bench-requests", capacity=REQUEST_RING_BYTES, num_readers=self._num_readers)
        self._sender = Sender(
            RingWriter(requests, is_peer_alive=self._is_all_alive), epoch=0, rank=EXECUTOR_RANK
        )
        self._resources.callback(self._sender.close)
        for index in range(self._num_readers):
            replies = create_ring(f"bench-replies-{index}", capacity=REPLY_RING_BYTES, num_readers=1)
            receiver = Receiver[Pong](
                RingReader(replies, 0, is_peer_alive=self._is_all_alive), {FrameKind.REPLY: Pong}
            )
            self._resources.callback(receiver.close)
            self._receivers.append(receiver)
            args = ReaderArgs(
                index=index,
                request_fd=requests.fd,
                request_bytes=requests.size,
                reply_fd=replies.fd,
                reply_bytes=replies.size,
            )
            spec = ChildSpec(
                role=f"bench reader {index}",
                target=TARGET,
                args=msgspec.msgpack.encode(args),
                rank=index,
                pass_fds=(requests.fd, replies.fd),
            )
            self._children.append(spawner.spawn(spec))
        wait_all_ready(self._children, time.monotonic() + START_TIMEOUT_S)

    def _is_all_alive(self) -> bool:
        return all(child.exitcode is None for child in self._children)

    def _end_children(self) -> None:
        for child in self._children:
            child.terminate()
        for child in self._children:
            child.stop(reason="the turn is over", timeout_s=5.0)
