"""The publisher of KV events: real sockets, listeners that read, come late, or do not read."""

import os
import socket
import struct
import threading
from queue import SimpleQueue

import msgspec
import pytest
import zmq

from phalanx.engine.config import SchedulerConfig
from phalanx.engine.core_io import ThreadFailed
from phalanx.engine.kv_event_publisher import MAX_QUEUED, TOPIC, KVEventPublisher
from phalanx.engine.kv_events import BlockStored, KVEventBatch
from phalanx.shm.errors import ConfigError, TransportError
from phalanx.shm.sockets import connect_sub
from support.children import wait_until

DEADLINE_MS = 20_000


def batch(sequence):
    stored = BlockStored(block_hash=bytes([sequence % 256]) * 32, parent_hash=None, token_ids=[1, 2])
    return KVEventBatch(dp_rank=1, epoch=0, sequence=sequence, events=[stored])


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    # Also what a test that fails leaves open: to wait for that would be for ever.
    context.destroy(linger=0)


@pytest.fixture
def publisher(tmp_path):
    made = KVEventPublisher(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay", SimpleQueue())
    made.start()
    yield made
    made.close()


@pytest.fixture
def listener(context, publisher, tmp_path):
    """Connect, and publish until something is heard: a PUB tells nobody when a listener has come."""
    subscriber = connect_sub(context, f"ipc://{tmp_path}/pub", TOPIC)

    def hears():
        publisher.publish([batch(0)])
        return subscriber.poll(20)

    wait_until(hears, timeout_s=20)
    publisher.publish([batch(1)])
    while receive(subscriber)[0] != 1:
        pass
    yield subscriber
    subscriber.close(linger=0)


def receive(subscriber):
    assert subscriber.poll(DEADLINE_MS), "nothing came"
    topic, sequence, data = subscriber.recv_multipart()
    assert topic == TOPIC
    return struct.unpack(">q", sequence)[0], msgspec.msgpack.decode(data, type=KVEventBatch)


def test_a_listener_gets_all_batches_in_their_order(publisher, listener):
    publisher.publish([batch(2), batch(3)])
    publisher.publish([batch(4)])

    assert [receive(listener) for _ in range(3)] == [(number, batch(number)) for number in (2, 3, 4)]


def test_a_question_is_passed_on_and_answered_and_nonsense_is_dropped(context, publisher, tmp_path):
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"ipc://{tmp_path}/replay")
    dealer.send_multipart([b"", b"nonsense that is no number"])
    dealer.send_multipart([b"", struct.pack(">q", 7)])

    asked = publisher._inbox.get(timeout=20)
    assert asked.first_sequence == 7
    publisher.answer(asked, [batch(7), batch(8)])

    assert dealer.poll(DEADLINE_MS)
    _, data = dealer.recv_multipart()
    assert msgspec.msgpack.decode(data, type=list[KVEventBatch]) == [batch(7), batch(8)]
    assert publisher._inbox.empty()
    dealer.close(linger=0)


def test_batches_beyond_the_bound_are_dropped_and_counted_and_nobody_waits(publisher, listener, monkeypatch):
    entered, release = threading.Event(), threading.Event()
    send_all = publisher._send_all

    def hold(*sockets):
        entered.set()
        assert release.wait(20)
        send_all(*sockets)

    monkeypatch.setattr(publisher, "_send_all", hold)
    os.eventfd_write(publisher._bell_fd, 1)
    assert entered.wait(20)

    publisher.publish([batch(number) for number in range(2, MAX_QUEUED + 12)])

    assert publisher.num_dropped == 10
    release.set()
    assert [receive(listener)[0] for _ in range(MAX_QUEUED)] == list(range(2, MAX_QUEUED + 2))
    publisher.publish([batch(MAX_QUEUED + 12)])
    assert receive(listener)[0] == MAX_QUEUED + 12, "the gap is seen"


@pytest.mark.parametrize("which", ["events", "replay"])
def test_an_address_that_is_taken_is_an_error_at_the_start(tmp_path, which):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken, free = f"tcp://127.0.0.1:{other.getsockname()[1]}", f"ipc://{tmp_path}/free"
        addresses = (taken, free) if which == "events" else (free, taken)
        publisher = KVEventPublisher(*addresses, SimpleQueue())
        with pytest.raises(TransportError, match="cannot bind"):
            publisher.start()
        publisher.close()


def test_a_thread_that_fails_says_so(tmp_path):
    inbox = SimpleQueue()
    publisher = KVEventPublisher(f"ipc://{tmp_path}/pub", None, inbox)
    publisher.start()

    publisher.publish([msgspec.structs.replace(batch(1), events=[object()])])

    failed = inbox.get(timeout=20)
    assert isinstance(failed, ThreadFailed)
    assert (failed.name, type(failed.error)) == ("kv-events", TypeError)
    publisher.close()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"kv_events_address": "ipc:///x"}, "kv_events_address"),
        ({"kv_events": True, "kv_events_replay_address": "ipc:///x"}, "kv_events_replay_address"),
    ],
)
def test_addresses_need_what_they_are_for(settings, field):
    with pytest.raises(ConfigError, match=field):
        SchedulerConfig(**settings)
