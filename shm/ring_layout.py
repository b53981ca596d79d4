"""The ring's memory: where everything stands in its segment, and how a segment becomes an empty ring.

Called by: ring_end.py, ring_writer.py and ring_reader.py in every process that has an end; by who plans and creates
segments.

Each line is 64 bytes: geometry (constant) | writer | reader 0 | ... | reader N-1 | flags | data. A line of the writer
or of a reader holds one word, written by its owner alone: how many bytes it has published or released since the
beginning (its cursor: records and padding, a multiple of 8), and in the lowest bit whether it has closed. So whatever
an end has to tell is told by one store, and the word that says it is the word to sleep on.

A flag is a word of its own, written by its owner alone: 1 while that end is asleep or about to be. The writer's comes
first, then those of the readers. They stand together, because they are read far more often than written. On a machine
without `Membarrier` every flag is 1 from the beginning, nobody touches it, and so everybody is always woken.

The kernel compares the low half of a word. An end stands still while it waits, and the other's cursor is never further
from it than the capacity, which is below 4 GiB: a cursor that has moved has another low half.

A record is an 8-byte header (its length in the low half, what it is in the high half) and its bytes, padded to 8.
A record does not wrap: when it does not fit before the end, a padding record fills the rest. A record takes at
most half of the ring, so that it fits an empty ring wherever that stands.

When a process dies: the memory stays as it was left, for as long as somebody maps it.
"""

from .ordering import CACHE_LINE_BYTES, WORD_BYTES, Membarrier, map_words
from .segment import SharedSegment

MAX_READERS = 16
MIN_CAPACITY = 256
HEADER_BYTES = WORD_BYTES

HAS_FLAGS = 3
"""The word of the geometry that is 0 where everybody is always woken."""
MAGIC = 0x5048_4C58_5249_4E47
WORDS_PER_LINE = CACHE_LINE_BYTES // WORD_BYTES
MAX_CAPACITY = (1 << 32) - CACHE_LINE_BYTES
WRITER_WORD = WORDS_PER_LINE
WRITER_FLAG = 0
CLOSED = 1
"""The bit of an end's word that is no part of its cursor."""
CURSOR_MASK = (1 << 64) - WORD_BYTES
RECORD, PADDING = 1 << 32, 2 << 32
"""What a header says beside a length."""


def reader_word(index: int) -> int:
    """Return where reader `index`'s word stands."""
    return (2 + index) * WORDS_PER_LINE


def reader_flag(index: int) -> int:
    """Return which of the flags is that of reader `index`."""
    return 1 + index


def lines_bytes(num_readers: int) -> int:
    """Return how many bytes stand before the data."""
    return (2 + num_readers) * CACHE_LINE_BYTES + flags_bytes(num_readers)


def flags_bytes(num_readers: int) -> int:
    """Return how many bytes hold the flags; they are the last ones before the data."""
    return -(-(1 + num_readers) // WORDS_PER_LINE) * CACHE_LINE_BYTES


def ring_bytes(capacity: int, num_readers: int) -> int:
    """Return the size of the segment that a ring of `capacity` data bytes needs."""
    return lines_bytes(num_readers) + capacity


def max_record_bytes(capacity: int) -> int:
    """Return the largest record that a ring of `capacity` takes."""
    return capacity // 2 - HEADER_BYTES


def create_ring(name: str, *, capacity: int, num_readers: int) -> SharedSegment:
    """Make a segment and write the geometry of an empty ring into it.

    capacity: data bytes below 4 GiB, rounded up to a multiple of 64. Raises TransportError when there is no memory.
    """
    if not 1 <= num_readers <= MAX_READERS:
        raise ValueError(f"a ring has 1 to {MAX_READERS} readers, not {num_readers}")
    capacity = max(MIN_CAPACITY, -(-capacity // CACHE_LINE_BYTES) * CACHE_LINE_BYTES)
    if capacity > MAX_CAPACITY:
        raise ValueError(f"a ring holds at most {MAX_CAPACITY} bytes, not {capacity}")
    segment = SharedSegment.create(name, ring_bytes(capacity, num_readers))
    num_line_bytes = lines_bytes(num_readers)
    words = map_words(segment.buffer[:num_line_bytes])
    words.store(1, capacity)
    words.store(2, num_readers)
    if Membarrier().is_available:
        words.store(HAS_FLAGS, 1)
    else:
        first = (num_line_bytes - flags_bytes(num_readers)) // WORD_BYTES
        for flag in range(first, num_line_bytes // WORD_BYTES):
            words.store(flag, 1)
    words.store(0, MAGIC)
    words.close()
    return segment
