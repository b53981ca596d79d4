"""Kernels that come onto the card while the one before them still ends compute what they would after it."""

import pytest
import torch

pytestmark = pytest.mark.gpu

NUM_LAYERS, SIZE, INNER = 24, 1024, 3072


@pytest.fixture
def ordinary_launches(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Undo gives early launches back."""
    from phalanx.workers.kernels import triton_activation, triton_linear, triton_norm

    for module in (triton_activation, triton_linear, triton_norm):
        monkeypatch.setattr(module, "dependent_launch", lambda device: {"IS_DEPENDENT": False})
    return monkeypatch


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [1, 4, 64])
def test_a_chain_of_kernels_in_a_graph_has_the_bits_of_ordinary_launches(
    ordinary_launches: pytest.MonkeyPatch, num_rows: int
) -> None:
    from phalanx.workers.kernels.dependent_launch import dependent_launch

    if not dependent_launch(torch.device("cuda", 0))["IS_DEPENDENT"]:
        pytest.skip("this card has ordinary launches only")
    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * 0.05).to(torch.bfloat16)

    weights = [(random(2 * INNER, SIZE), random(SIZE, INNER), random(SIZE)) for _ in range(NUM_LAYERS)]
    x = random(num_rows, SIZE)
    expected = Recorded(x, weights)
    expected.replay()
    wanted = expected.result.clone()
    ordinary_launches.undo()

    chain = Recorded(x, weights)
    for _ in range(200):
        chain.result.fill_(float("nan"))
        chain.replay()
        assert torch.equal(chain.result, wanted)


class Recorded:
    """A graph of layers of a small MLP: each kernel reads what the one before it has just written."""

    def __init__(self, x: torch.Tensor, weights: list[tuple[torch.Tensor, ...]]) -> None:
        self._x, self._weights = x, weights
        self._compute()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.result = self._compute()
        self.replay = self._graph.replay

    def _compute(self) -> torch.Tensor:
        from phalanx.workers.kernels.triton_activation import gated_activation
        from phalanx.workers.kernels.triton_linear import MAX_ROWS, gemv
        from phalanx.workers.kernels.triton_norm import add_rms_norm

        product = gemv if self._x.shape[0] <= MAX_ROWS else torch.nn.functional.linear
        x, residual = self._x, None
        for gate_up, down, norm in self._weights:
            normalized, residual = add_rms_norm(x, residual, norm, 1e-6)
            x = product(gated_activation(product(normalized, gate_up), is_gelu=False), down)
        return add_rms_norm(x, residual, norm, 1e-6)[0]
