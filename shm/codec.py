"""Frames: a fixed header, a msgpack body of a known type, and raw buffers beside it.

Called by: channel.py. Pure: knows of no ring and no process.

    epoch u32 | call_id u64 | rank i16 | kind u8 | number of buffers u8 | body bytes u32   (20 bytes, little-endian)
    body, padded to 8 | for each buffer: length u64, bytes, padded to 8

Invariant: what does not decode raises ProtocolError, whatever the bytes are; nothing from the wire is run.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Generic, TypeVar

import msgspec

from .errors import ProtocolError, ServingError

T = TypeVar("T")

MAX_BUFFERS = 255

_HEADER = struct.Struct("<IQhBBI")
_LENGTH = struct.Struct("<Q")
_HEADER_BYTES, _LENGTH_BYTES = _HEADER.size, _LENGTH.size
# Looked up once: they are called for every frame.
_pack_header, _unpack_header = _HEADER.pack, _HEADER.unpack_from
_pack_length, _unpack_length = _LENGTH.pack, _LENGTH.unpack_from
_ALIGNMENT = 8
_PADDING = [bytes(-position % _ALIGNMENT) for position in range(_ALIGNMENT)]
"""What brings a position to the next multiple of 8, by the position modulo 8."""


class FrameKind(IntEnum):
    """What a frame is."""

    REQUEST = 1
    """A call, to all readers of a ring."""
    REPLY = 2
    """The answer of one rank to one call."""
    ERROR = 3
    """Instead of an answer: the call failed on this rank."""
    TICKET = 4
    """Stands for a frame that is too large for the ring and comes another way."""


class FrameHeader(msgspec.Struct, frozen=True, gc=False):
    """Who says what about which call.

    epoch:   counts the lives of a replica; a frame of another life is stale
    call_id: counts the calls of one epoch, from 1
    rank:    of who wrote the frame; -1: the executor
    """

    epoch: int
    call_id: int
    rank: int
    kind: FrameKind


class Frame(FrameHeader, Generic[T], frozen=True, gc=False):
    """A decoded frame. `buffers` are views into the ring, valid only until the read ends."""

    message: T
    buffers: tuple[memoryview, ...]


class FrameEncoder:
    """Encodes messages of one epoch and rank to the pieces of a frame, which the ring gathers. One thread."""

    def __init__(self, *, epoch: int, rank: int) -> None:
        self._epoch = epoch
        self._rank = rank
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(
        self, kind: FrameKind, call_id: int, message: object, buffers: Sequence[bytes | memoryview] = ()
    ) -> list[bytes | memoryview]:
        """Return the pieces that make up the frame, in order. The buffers are pieces of their own, and not copied.

        Raises ProtocolError for a message that msgpack cannot carry, or too many buffers.
        """
        piece = self._encode_head(kind, call_id, message, len(buffers))
        if not buffers:
            return [piece]
        pieces: list[bytes | memoryview] = []
        position = len(piece)
        for buffer in buffers:
            num_bytes = len(buffer) if isinstance(buffer, bytes) else buffer.nbytes
            # With what stands before: a piece costs the ring as much as a few hundred bytes.
            pieces += piece + _PADDING[position % _ALIGNMENT] + _pack_length(num_bytes), buffer
            piece = b""
            position = num_bytes
        return pieces

    def encode_message(self, kind: FrameKind, call_id: int, message: object) -> bytes:
        """Return a frame without buffers. Raises as `encode`."""
        return self._encode_head(kind, call_id, message, 0)

    def _encode_head(self, kind: FrameKind, call_id: int, message: object, num_buffers: int) -> bytes:
        """Return the header and the body."""
        try:
            body = self._encode(message)
            return _pack_header(self._epoch, call_id, self._rank, kind, num_buffers, len(body)) + body
        except (TypeError, ValueError, OverflowError, struct.error, msgspec.MsgspecError) as error:
            if num_buffers > MAX_BUFFERS:
                raise ProtocolError(
                    f"{num_buffers} buffers in a frame; at most {MAX_BUFFERS} are allowed"
                ) from error
            raise ProtocolError(f"a {type(message).__name__} cannot be encoded: {error}") from error


class FrameDecoder(Generic[T]):
    """Decodes frames whose body's type depends on their kind. One thread.

    types: for each kind that may come, the type (or tagged union) of its body; together they are T
    """

    def __init__(self, types: Mapping[FrameKind, Any]) -> None:
        self._decoders: dict[int, tuple[FrameKind, Callable[[memoryview], T]]] = {
            int(kind): (kind, msgspec.msgpack.Decoder(body_type).decode) for kind, body_type in types.items()
        }

    def decode(
        self, data: memoryview, start: int = 0, end: int | None = None, *, has_buffers: bool = True
    ) -> Frame[T]:
        """Decode the frame that stands in `data` from `start` up to `end` (None: up to the end of `data`).

        has_buffers: False: what stands beside the message is not looked at, and the frame has no buffers
        Raises ProtocolError when it is not a frame.
        """
        if end is None:
            end = data.nbytes
        try:
            epoch, call_id, rank, number, num_buffers, body_bytes = _unpack_header(data, start)
            body_start = start + _HEADER_BYTES
            body_end = body_start + body_bytes
            if body_end > end:
                raise ProtocolError(f"a body of {body_bytes} bytes in a frame of {end - start}")
            known = self._decoders.get(number)
            if known is None:
                raise ProtocolError(f"a frame of kind {FrameKind(number).name} must not come here")
            kind, decode_body = known
            message = decode_body(data[body_start:body_end])
            buffers = (
                _cut_buffers(data, start, body_end, end, num_buffers) if num_buffers and has_buffers else ()
            )
        except ProtocolError:
            raise
        # A message's own checks (`__post_init__`) raise errors of this project.
        except (struct.error, ValueError, TypeError, msgspec.MsgspecError, ServingError) as error:
            raise ProtocolError(f"a frame of {end - start} bytes does not decode: {error}") from error
        # By position: names would double what it costs to make one.
        return Frame(epoch, call_id, rank, kind, message, buffers)


def _cut_buffers(
    data: memoryview, start: int, position: int, end: int, num_buffers: int
) -> tuple[memoryview, ...]:
    """Cut the buffers of the frame from `start` to `end` from what stands behind its body, from `position` on."""
    buffers = []
    for _ in range(num_buffers):
        first = position + (start - position) % _ALIGNMENT + _LENGTH_BYTES
        (num_bytes,) = _unpack_length(data, first - _LENGTH_BYTES)
        position = first + num_bytes
        if position > end:
            raise ProtocolError(f"a buffer of {num_bytes} bytes in a frame of {end - start}")
        buffers.append(data[first:position])
    return tuple(buffers)
