"""Every exit code that we choose ourselves, for all processes."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of our processes. Codes above 127 and negative ones are signals, not ours."""

    OK = 0
    FAILED = 1
    """An error. cluster-launch: something did not start, or died and could not be replaced."""
    BAD_CONFIG = 2
    """A setting is wrong; nothing was started."""
    BOOT_FAILED = 3
    """A child that never became ready; not restarted."""
    PARENT_GONE = 4
    """A child whose parent died."""
    WORKER_LOST = 5
    """An engine core that ends because one of its workers died or failed in a step."""
    PROTOCOL = 6
    """A worker that got a frame which must not come now: to go on would be to run out of step with its peers."""
    INTERRUPTED = 130
    """Stopped by a second Ctrl-C."""
