"""The two socket threads of an engine core: messages in, outputs and statistics out.

Called by: core_proc.py and core_loop.py, in the engine-core process. The main thread touches no socket: it takes
`InboxItem`s from one queue and puts outputs into another, so that decoding, encoding and sending overlap with the step.

    PULL (bound) -> thread core-input  -> inbox  -> main thread -> outbox -> thread core-output -> PUSH per front end
                    signal handler     ->                                                       -> PUSH statistics
                    executor's thread  ->

When a front end stands still, its outputs wait for it: no more than the requests that it has sent will make. When it
dies, whoever watches it says so (`FrontEndGone`), and what waits is dropped. A thread that fails says so
(`ThreadFailed`), and the process ends.
"""

import contextlib
import logging
import os
import threading
from dataclasses import dataclass
from queue import SimpleQueue

import msgspec
import zmq

from ..shm.errors import ProcessError, TransportError
from ..shm.sockets import UNBOUNDED, bind_pull, connect_push
from ..workers.sampling_params import SamplingParamsError
from .core_control import CoreControl, FrontEndGone
from .messages import (
    ClientHello,
    ClientMessage,
    EngineCoreOutputs,
    EngineStats,
)

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_MS = 1000
"""How long closing waits for front ends to take the last outputs."""


@dataclass(frozen=True, slots=True)
class ClientLost:
    """A front end gets no outputs: it cannot be reached, or is gone."""

    client_index: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The process shall end."""


@dataclass(frozen=True, slots=True)
class ExecutorFailed:
    """A worker died while no step was running."""

    error: ProcessError


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """A request that waits for its grammar can go on."""


@dataclass(frozen=True, slots=True)
class ThreadFailed:
    """A bug has ended a socket thread: without it the process is of no use."""

    name: str
    error: Exception


@dataclass(frozen=True, slots=True)
class ReplayAsked:
    """A listener has missed batches, from `first_sequence` on. identity: whom `KVEventPublisher.answer` answers."""

    identity: bytes
    first_sequence: int


InboxItem = (
    ClientMessage
    | ClientLost
    | StopRequested
    | ExecutorFailed
    | GrammarReady
    | ThreadFailed
    | ReplayAsked
    | CoreControl
    | FrontEndGone
)
Inbox = SimpleQueue[InboxItem]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOutputs:
    """One message for one front end."""

    client_index: int
    outputs: EngineCoreOutputs


class CoreInput:
    """Thread that receives and decodes what front ends send. A message that does not decode is dropped."""

    def __init__(self, address: str, inbox: Inbox) -> None:
        self._address = address
        self._inbox = inbox
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._stop_fd = -1
        self._thread: threading.Thread | None = None
        self.num_malformed = 0

    def start(self) -> None:
        """Bind and start the thread. Raises TransportError when the address cannot be bound."""
        self._context = zmq.Context()
        socket = bind_pull(self._context, self._address)
        self._stop_fd = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, args=(socket,), name="core-input", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Put what has arrived into the inbox, and stop the thread. Idempotent."""
        if self._thread is not None:
            os.eventfd_write(self._stop_fd, 1)
            self._thread.join()
            self._thread = None
            os.close(self._stop_fd)
        if self._context is not None:
            self._context.term()
            self._context = None

    def _run(self, socket: "zmq.Socket[bytes]") -> None:
        try:
            self._receive(socket)
        # The top of a thread.
        except Exception as error:
            self._inbox.put(ThreadFailed("core-input", error))
        finally:
            socket.close(linger=0)

    def _receive(self, socket: "zmq.Socket[bytes]") -> None:
        decoder = msgspec.msgpack.Decoder(ClientMessage)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._stop_fd, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            is_last = self._stop_fd in ready
            with contextlib.suppress(zmq.Again):
                # At the end all that has arrived, so that whoever sent it gets an answer.
                self._take(decoder, socket.recv(zmq.NOBLOCK))
                while is_last:
                    self._take(decoder, socket.recv(zmq.NOBLOCK))
            if is_last:
                break

    def _take(self, decoder: "msgspec.msgpack.Decoder[ClientMessage]", data: bytes) -> None:
        try:
            self._inbox.put(decoder.decode(data))
        # SamplingParams check themselves while they are decoded, and raise an error of their own.
        except (msgspec.DecodeError, SamplingParamsError, RecursionError) as error:
            self.num_malformed += 1
            log.warning("malformed message dropped bytes=%d error=%s", len(data), error)


class CoreOutput:
    """Thread that encodes and sends what the engine core makes."""

    def __init__(self, stats_address: str | None, inbox: Inbox) -> None:
        self._stats_address = stats_address
        self._inbox = inbox
        self._outbox: SimpleQueue[ClientOutputs | ClientHello | ClientLost | EngineStats | None] = (
            SimpleQueue()
        )
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._clients: dict[int, zmq.Socket[bytes]] = {}
        self._thread: threading.Thread | None = None
        self.num_dropped = 0

    def start(self) -> None:
        """Start the thread. Raises TransportError when the address for statistics is wrong."""
        self._context = context = zmq.Context()
        stats = connect_push(context, self._stats_address) if self._stats_address is not None else None
        self._thread = threading.Thread(
            target=self._run, args=(context, stats), name="core-output", daemon=True
        )
        self._thread.start()

    def put(self, item: ClientOutputs | ClientHello | ClientLost | EngineStats) -> None:
        """Hand over one message; never blocks. A hello connects its front end, until it is lost."""
        self._outbox.put(item)

    def close(self) -> None:
        """Send what was handed over, wait at most a second for it to be taken, and stop. Idempotent."""
        if self._thread is not None:
            self._outbox.put(None)
            self._thread.join()
            self._thread = None
        if self._context is not None:
            self._context.term()
            self._context = None

    def _run(self, context: "zmq.Context[zmq.Socket[bytes]]", stats: "zmq.Socket[bytes] | None") -> None:
        try:
            self._send_all(context, stats)
        # The top of a thread.
        except Exception as error:
            self._inbox.put(ThreadFailed("core-output", error))
        finally:
            for socket in self._clients.values():
                socket.close(linger=FLUSH_TIMEOUT_MS)
            if stats is not None:
                stats.close(linger=0)

    def _send_all(self, context: "zmq.Context[zmq.Socket[bytes]]", stats: "zmq.Socket[bytes] | None") -> None:
        encoder = msgspec.msgpack.Encoder()
        while (item := self._outbox.get()) is not None:
            match item:
                case ClientHello():
                    self._connect(context, item)
                case ClientLost():
                    self._disconnect(item.client_index)
                case ClientOutputs():
                    self._send(item.client_index, encoder.encode(item.outputs))
                case EngineStats():
                    self._send_stats(stats, encoder.encode(item))

    def _connect(self, context: "zmq.Context[zmq.Socket[bytes]]", hello: ClientHello) -> None:
        self._disconnect(hello.client_index)
        try:
            # An output that is dropped would have its request wait for ever.
            self._clients[hello.client_index] = connect_push(
                context, hello.output_address, max_queued_messages=UNBOUNDED
            )
        except TransportError as error:
            log.warning("front end cannot be reached client_index=%d error=%s", hello.client_index, error)
            self._inbox.put(ClientLost(hello.client_index))

    def _disconnect(self, client_index: int) -> None:
        socket = self._clients.pop(client_index, None)
        if socket is not None:
            socket.close(linger=0)

    def _send(self, client_index: int, data: bytes) -> None:
        socket = self._clients.get(client_index)
        if socket is None:
            self.num_dropped += 1
        else:
            socket.send(data, zmq.NOBLOCK)

    def _send_stats(self, socket: "zmq.Socket[bytes] | None", data: bytes) -> None:
        if socket is not None:
            try:
                socket.send(data, zmq.NOBLOCK)
            except zmq.Again:
                # Nobody collects; the next report says more than this one.
                self.num_dropped += 1
