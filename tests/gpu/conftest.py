"""Opens the device once, before any test looks at what it leaves behind: the driver's descriptors stay open."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def opened_once() -> None:
    """Also those of the first graph, and of the first pinned memory."""
    if torch.cuda.is_available():
        graph = torch.cuda.CUDAGraph()
        numbers = torch.zeros(1, device="cuda")
        with torch.cuda.graph(graph):
            numbers.add_(1)
        graph.replay()
        torch.empty(1, pin_memory=True)
        torch.cuda.synchronize()
