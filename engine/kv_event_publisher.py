"""KVEventPublisher: tells listeners outside the cluster what the prefix cache of one replica holds.

Called by: core_proc.py and core_loop.py, in the engine-core process. The main thread hands batches over and never
waits; a thread of its own has the sockets.

    PUB     [b"kv", sequence, batch]            batch: a `KVEventBatch` as msgpack; sequence: its own, 8 bytes, signed,
                                                big-endian, so that a gap is seen without decoding
    ROUTER  <- [first_sequence]                 8 bytes likewise; from a REQ socket, or a DEALER with an empty frame
            -> [msgpack of list[KVEventBatch]]  the batches from there on, or one snapshot when the first of them is
                                                not kept any more

Invariant: nothing that a listener does, or does not do, holds up a step. What the thread has not sent when
`MAX_QUEUED` batches wait is dropped and counted, and PUB drops for a listener that does not read; either way the
listener sees a gap in the sequence numbers, and asks for what is missing. An answer that cannot be delivered is
dropped as well, and the listener asks again. When a listener dies: nothing. When the thread fails it says so
(`ThreadFailed`), and the process ends: listeners would take for true for ever what they heard last.
"""

import contextlib
import logging
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, Full, Queue

import msgspec
import zmq

from ..shm.sockets import bind_pub, bind_router
from .core_io import Inbox, ReplayAsked, ThreadFailed
from .kv_events import KVEventBatch

log = logging.getLogger(__name__)

TOPIC = b"kv"
MAX_QUEUED = 1000
"""Batches between the main thread and the publisher's: about half a minute of decoding."""

_SEQUENCE = struct.Struct(">q")


@dataclass(frozen=True, slots=True)
class _Answer:
    identity: bytes
    batches: list[KVEventBatch]


class KVEventPublisher:
    """See the module. `start`, then any of the others from one thread, then `close`.

    address, replay_address: where it binds
    inbox:                   gets a `ReplayAsked` for each question, to be answered by `answer`, and a `ThreadFailed`
    """

    def __init__(self, address: str, replay_address: str | None, inbox: Inbox) -> None:
        self._address = address
        self._replay_address = replay_address
        self._inbox = inbox
        self._outbox: Queue[KVEventBatch | _Answer] = Queue(MAX_QUEUED)
        self._encoder = msgspec.msgpack.Encoder()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = threading.Event()
        self._bell_fd = -1
        self.num_dropped = 0

    def start(self) -> None:
        """Bind, and start the thread. Raises TransportError for an address that cannot be had."""
        self._context = context = zmq.Context()
        publisher = bind_pub(context, self._address)
        replay = None
        if self._replay_address is not None:
            try:
                replay = bind_router(context, self._replay_address)
            except BaseException:
                publisher.close()
                raise
        self._bell_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=self._run, args=(publisher, replay), name="kv-events", daemon=True
        )
        self._thread.start()

    def publish(self, batches: Sequence[KVEventBatch]) -> None:
        """Tell all listeners. Never blocks: what finds no room is dropped and counted."""
        for batch in batches:
            self._put(batch)

    def answer(self, asked: ReplayAsked, batches: list[KVEventBatch]) -> None:
        """Answer a question. Never blocks; likewise."""
        self._put(_Answer(asked.identity, batches))

    def close(self) -> None:
        """Send what waits, as far as listeners take it at once, and stop. Idempotent."""
        if self._thread is not None:
            self._is_closed.set()
            os.eventfd_write(self._bell_fd, 1)
            self._thread.join()
            self._thread = None
            os.close(self._bell_fd)
        if self._context is not None:
            self._context.term()
            self._context = None

    def _put(self, item: KVEventBatch | _Answer) -> None:
        try:
            self._outbox.put_nowait(item)
        except Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                log.warning("kv events are dropped: they come faster than they can be sent")
            return
        os.eventfd_write(self._bell_fd, 1)

    def _run(self, publisher: "zmq.Socket[bytes]", replay: "zmq.Socket[bytes] | None") -> None:
        try:
            self._serve(publisher, replay)
        # The top of a thread.
        except Exception as error:
            self._inbox.put(ThreadFailed("kv-events", error))
        finally:
            # Whatever happened: `close` waits until the context has no socket left.
            publisher.close(linger=0)
            if replay is not None:
                replay.close(linger=0)

    def _serve(self, publisher: "zmq.Socket[bytes]", replay: "zmq.Socket[bytes] | None") -> None:
        poller = zmq.Poller()
        poller.register(self._bell_fd, zmq.POLLIN)
        if replay is not None:
            poller.register(replay, zmq.POLLIN)
        while not self._is_closed.is_set():
            ready = dict(poller.poll())
            if self._bell_fd in ready:
                os.eventfd_read(self._bell_fd)
            self._send_all(publisher, replay)
            if replay is not None and replay in ready:
                self._take_question(replay)
        self._send_all(publisher, replay)

    def _send_all(self, publisher: "zmq.Socket[bytes]", replay: "zmq.Socket[bytes] | None") -> None:
        with contextlib.suppress(Empty):
            while True:
                item = self._outbox.get_nowait()
                # A full queue of one listener: PUB drops for it by itself, ROUTER says so.
                with contextlib.suppress(zmq.Again):
                    if isinstance(item, KVEventBatch):
                        number = _SEQUENCE.pack(item.sequence)
                        publisher.send_multipart([TOPIC, number, self._encoder.encode(item)], zmq.NOBLOCK)
                    elif replay is not None:
                        data = self._encoder.encode(item.batches)
                        replay.send_multipart([item.identity, b"", data], zmq.NOBLOCK)

    def _take_question(self, replay: "zmq.Socket[bytes]") -> None:
        identity, *rest = replay.recv_multipart()
        if len(rest) == 2 and rest[0] == b"" and len(rest[1]) == _SEQUENCE.size:
            self._inbox.put(ReplayAsked(identity, max(0, _SEQUENCE.unpack(rest[1])[0])))
        else:
            log.warning("malformed question for kv events dropped frames=%d", len(rest))
