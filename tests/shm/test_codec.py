"""Frames: what goes in comes out, and anything else is a ProtocolError."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.shm.codec import Frame, FrameDecoder, FrameEncoder, FrameHeader, FrameKind
from phalanx.shm.errors import ProtocolError, ServingError


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    text: str


class Picky(msgspec.Struct, frozen=True, tag="picky"):
    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ServingError("must not be negative")


Message = Ping | Picky


def decoder() -> FrameDecoder[Message]:
    return FrameDecoder({FrameKind.REQUEST: Message})


def encode(header: FrameHeader, message: object, buffers: list[bytes] | None = None) -> bytes:
    encoder = FrameEncoder(epoch=header.epoch, rank=header.rank)
    return b"".join(encoder.encode(header.kind, header.call_id, message, buffers or []))


def request(call_id: int = 1) -> FrameHeader:
    return FrameHeader(epoch=0, call_id=call_id, rank=-1, kind=FrameKind.REQUEST)


@given(
    epoch=st.integers(0, 2**32 - 1),
    call_id=st.integers(0, 2**64 - 1),
    rank=st.integers(-(2**15), 2**15 - 1),
    text=st.text(max_size=50),
    buffers=st.lists(st.binary(max_size=40), max_size=5),
)
def test_a_frame_comes_back_as_it_was(
    epoch: int, call_id: int, rank: int, text: str, buffers: list[bytes]
) -> None:
    header = FrameHeader(epoch=epoch, call_id=call_id, rank=rank, kind=FrameKind.REQUEST)

    frame: Frame[Message] = decoder().decode(memoryview(encode(header, Ping(text), buffers)))

    assert (frame.epoch, frame.call_id, frame.rank, frame.kind) == (epoch, call_id, rank, FrameKind.REQUEST)
    assert frame.message == Ping(text)
    assert [bytes(buffer) for buffer in frame.buffers] == buffers


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_buffers_are_aligned(sizes: list[int]) -> None:
    encoder = FrameEncoder(epoch=0, rank=0)
    pieces = encoder.encode(FrameKind.REQUEST, 1, Ping("x"), [bytes(size) for size in sizes])

    buffers = pieces[1::2]
    assert [len(buffer) for buffer in buffers] == sizes
    position = 0
    for index, piece in enumerate(pieces):
        if index % 2 == 1:
            assert position % 8 == 0
        position += len(piece)


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_a_protocol_error_or_a_frame(data: bytes) -> None:
    try:
        assert isinstance(decoder().decode(memoryview(data)), Frame)
    except ProtocolError:
        pass


@given(before=st.integers(0, 5), after=st.integers(0, 40), data=st.data())
def test_a_frame_is_found_among_other_bytes_and_ends_where_it_ends(
    before: int, after: int, data: st.DataObject
) -> None:
    whole = encode(request(7), Ping("some text"), [b"12345", b"", b"123456789"])
    start, end = 8 * before, 8 * before + len(whole)
    memory = memoryview(bytes(start) + whole + b"\xff" * after)

    frame = decoder().decode(memory, start, end)
    assert (frame.call_id, frame.message) == (7, Ping("some text"))
    assert [bytes(buffer) for buffer in frame.buffers] == [b"12345", b"", b"123456789"]
    assert decoder().decode(memory, start, end, has_buffers=False).buffers == ()
    with pytest.raises(ProtocolError):
        decoder().decode(memory, start, start + data.draw(st.integers(0, len(whole) - 1)))


@given(st.data())
def test_a_truncated_frame_is_a_protocol_error(data: st.DataObject) -> None:
    whole = encode(request(), Ping("some text"), [b"12345", b"123456789"])
    length = data.draw(st.integers(0, len(whole) - 1))

    with pytest.raises(ProtocolError):
        decoder().decode(memoryview(whole[:length]))


def test_a_kind_that_does_not_belong_here_is_a_protocol_error() -> None:
    header = FrameHeader(epoch=0, call_id=1, rank=0, kind=FrameKind.REPLY)

    with pytest.raises(ProtocolError, match="REPLY"):
        decoder().decode(memoryview(encode(header, Ping("x"))))


def test_a_message_that_refuses_itself_is_a_protocol_error() -> None:
    raw = {"type": "picky", "number": -1}

    with pytest.raises(ProtocolError, match="negative"):
        decoder().decode(memoryview(encode(request(), raw)))


@pytest.mark.parametrize("message", [object(), {"x": 2**80}, [Ping("x"), object()]])
def test_what_cannot_be_encoded_is_a_protocol_error(message: object) -> None:
    with pytest.raises(ProtocolError, match="cannot be encoded"):
        encode(request(), message)


def test_too_many_buffers_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="256 buffers"):
        encode(request(), Ping("x"), [b""] * 256)
