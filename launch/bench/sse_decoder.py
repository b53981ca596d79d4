"""Server-sent events out of bytes that arrive in any pieces. Pure.

Called by: openai_client.py, for each piece of a response. By the standard: lines end in LF, CR LF or CR; an empty
line ends an event; `data` lines of one event are joined with LF; comments and other fields are ignored.
"""


class SseDecoder:
    """Decodes one stream."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Take a piece of the stream. Returns the data of the events that it completes."""
        self._rest += piece
        events: list[bytes] = []
        start = 0
        while (end := _line_end(self._rest, start)) is not None:
            line_end, start_of_next = end
            self._take(self._rest[start:line_end], events)
            start = start_of_next
        self._rest = self._rest[start:]
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data = []
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))


def _line_end(text: bytes, start: int) -> tuple[int, int] | None:
    """Return where the line from `start` ends, and where the next begins; None: not here yet.

    A CR at the very end may be half of a CR LF, so it waits.
    """
    feed, carriage = text.find(b"\n", start), text.find(b"\r", start)
    if carriage >= 0 and (feed < 0 or carriage < feed):
        if carriage + 1 == len(text):
            return None
        return carriage, carriage + (2 if text[carriage + 1] == 0x0A else 1)
    return None if feed < 0 else (feed, feed + 1)
