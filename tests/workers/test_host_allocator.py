"""malloc's settings: glibc says whether it takes them."""

import platform

import pytest

from phalanx.workers.host_allocator import keep_large_buffers


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc only")
def test_glibc_takes_both_thresholds() -> None:
    assert keep_large_buffers()
