"""The wait for the memory of a process that has died on this device before. Pure but for its clock.

Called by: Worker, as it opens its device, when its replica is started again. The driver gives the memory of a dead
process back some time after its end, in a container nobody can see whose memory it is, and a rank that counts its
KV blocks too early gets few of them for the rest of its life, or none. What was free when the rank started for the
first time is what must be free again.
"""

import time
from collections.abc import Callable

SLACK_BYTES = 512 << 20
"""Less than before is taken for the same: contexts of other processes come and go."""
POLL_S = 0.1


def wait_for_memory(
    read_free_bytes: Callable[[], int],
    expected_free_bytes: int,
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until about `expected_free_bytes` are free again. False: they were not within `timeout_s`."""
    deadline_at = clock() + timeout_s
    while read_free_bytes() < expected_free_bytes - SLACK_BYTES:
        if clock() >= deadline_at:
            return False
        sleep(POLL_S)
    return True
