"""What can go wrong with a benchmark itself."""

from ...shm.errors import ServingError


class BenchError(ServingError):
    """The benchmark cannot go on: a peer ended, a server does not answer, a file does not read."""
