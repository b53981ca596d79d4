"""A ring of variable-size records in shared memory: one writer, 1 to 16 readers, everyone reads everything.

Called by: the executor (writes steps, reads replies) and the workers (read steps, write replies); each end is
used by one thread. One copy in, none out: a reader decodes from a view of the ring and then lets it go.
ring_layout.py has the memory, ring_writer.py and ring_reader.py the ends, ring_end.py how they wait for each other.

Invariants: reader cursor <= writer cursor <= reader cursor + capacity, for every reader; cursors are multiples
of 8 and never go back. The data between a reader's cursor and the writer's is not touched by the writer.

When the peer dies: a wait raises QueueClosedError within WAIT_SLICE_S. What was published before can still be read.
"""

from .ring_end import WAIT_SLICE_S, RingStats
from .ring_layout import MAX_READERS, create_ring, max_record_bytes, ring_bytes
from .ring_reader import RingReader
from .ring_writer import RingWriter

__all__ = [
    "MAX_READERS",
    "WAIT_SLICE_S",
    "RingReader",
    "RingStats",
    "RingWriter",
    "create_ring",
    "max_record_bytes",
    "ring_bytes",
]
