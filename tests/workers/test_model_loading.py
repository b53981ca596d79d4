"""Weights are loaded while something else goes on."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from phalanx.workers import model_loading
from phalanx.workers.config import LoadFormat, ModelConfig
from phalanx.workers.errors import WeightsError
from phalanx.workers.model_loading import build_model, fill_model, fill_model_beside
from phalanx.workers.models.causal_lm import CausalLM
from phalanx.workers.partition import make_partition
from phalanx.workers.tp_group import connect_group
from phalanx.workers.transformer_config import read_transformer_config
from support.tiny_models import write_tiny_llama

CPU = torch.device("cpu")
WAIT_S = 20.0


def build(folder: Path) -> tuple[CausalLM, ModelConfig]:
    config = ModelConfig(path=str(folder), load_format=LoadFormat.DUMMY)
    transformer = read_transformer_config(config.path)
    partition = make_partition(transformer, tp_size=1, tp_rank=0)
    group = connect_group(rank=0, size=1, rendezvous=None, device=CPU, share_device=False, arena_fd=None)
    model = build_model(
        transformer, partition, group, None, dtype=torch.float32, max_positions=64, device=CPU
    )
    return model, config


def test_weights_are_the_same_with_and_without_company(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    alone, config = build(folder)
    beside, _ = build(folder)

    expected, _ = fill_model(alone, config, CPU)
    found, seconds = fill_model_beside(beside, config, CPU, lambda: None)

    assert found == expected
    assert seconds > 0.0
    token_ids = torch.arange(8)
    with torch.inference_mode():
        torch.testing.assert_close(beside.embed(token_ids), alone.embed(token_ids), rtol=0.0, atol=0.0)


def test_both_go_on_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = build(write_tiny_llama(tmp_path))
    fills, works = threading.Event(), threading.Event()

    def load(*arguments: object) -> int:
        fills.set()
        assert works.wait(WAIT_S), "the work has not begun"
        return 0

    def work() -> None:
        works.set()
        assert fills.wait(WAIT_S), "the loading has not begun"

    monkeypatch.setattr(model_loading, "load_weights", load)

    fill_model_beside(model, config, CPU, work)


@pytest.mark.parametrize("does_work_fail", [False, True])
def test_an_error_of_either_is_raised_when_both_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does_work_fail: bool
) -> None:
    model, config = build(write_tiny_llama(tmp_path))
    ended, failed = [], threading.Event()

    def load(*arguments: object) -> int:
        if not does_work_fail:
            failed.set()
            raise WeightsError("lacks a tensor")
        assert failed.wait(WAIT_S)
        ended.append("loading")
        return 0

    def work() -> None:
        if does_work_fail:
            failed.set()
            raise RuntimeError("does not compile")
        assert failed.wait(WAIT_S)
        ended.append("work")

    monkeypatch.setattr(model_loading, "load_weights", load)
    usual_s = sys.getswitchinterval()

    with pytest.raises(RuntimeError if does_work_fail else WeightsError):
        fill_model_beside(model, config, CPU, work)

    assert ended == ["loading" if does_work_fail else "work"]
    assert sys.getswitchinterval() == usual_s


@pytest.mark.full
def test_a_model_is_made_without_computer_algebra(tmp_path: Path) -> None:
    """Torch imports it for what a model does not need, and it is half a second of every start."""
    code = (
        "import sys; from pathlib import Path; from support.model_steps import make_worker; "
        f"worker = make_worker(Path({str(write_tiny_llama(tmp_path))!r})); worker.start(); worker.close(); "
        "print('sympy' in sys.modules)"
    )
    tests = Path(__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tests, capture_output=True, text=True, check=True, timeout=120
    )

    assert result.stdout.split() == ["False"]
