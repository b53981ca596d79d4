"""The wait for a dead process's memory, on a clock of its own."""

from phalanx.workers.memory_wait import POLL_S, SLACK_BYTES, wait_for_memory


class Device:
    """Gives memory back at a rate, as time passes."""

    def __init__(self, *, free_bytes: int, per_s: int) -> None:
        self.now = 0.0
        self._free_bytes = free_bytes
        self._per_s = per_s

    def read(self) -> int:
        return self._free_bytes + int(self.now * self._per_s)

    def clock(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.now += duration_s


def wait(device: Device, expected_free_bytes: int, *, timeout_s: float = 60.0) -> bool:
    return wait_for_memory(
        device.read, expected_free_bytes, timeout_s=timeout_s, clock=device.clock, sleep=device.sleep
    )


def test_memory_that_is_free_is_not_waited_for() -> None:
    device = Device(free_bytes=80 << 30, per_s=0)

    assert wait(device, (80 << 30) + SLACK_BYTES)
    assert device.now == 0.0


def test_it_waits_until_the_memory_comes_back() -> None:
    device = Device(free_bytes=10 << 30, per_s=10 << 30)

    assert wait(device, 40 << 30)
    assert 2.9 <= device.now <= 3.0 + 2 * POLL_S


def test_it_gives_up_at_its_deadline() -> None:
    device = Device(free_bytes=10 << 30, per_s=0)

    assert not wait(device, 40 << 30, timeout_s=5.0)
    assert 5.0 <= device.now <= 5.0 + 2 * POLL_S
