"""What the tests of this folder share: the load generator's event loop, once for the whole process."""

import pytest
import uvloop


@pytest.fixture(scope="session", autouse=True)
def libuv_has_its_pipe() -> None:
    """From its first loop on, libuv keeps one pipe for signals in each process: no leak of a test's."""
    uvloop.new_event_loop().close()
