"""A worker that sleeps and wakes computes the same as before, from an empty cache."""

from pathlib import Path

import pytest

from phalanx.workers.sleep import SleepLevel
from support.model_steps import make_worker, prompt_step
from support.tiny_models import write_tiny_llama


@pytest.mark.parametrize("level", SleepLevel)
def test_it_computes_the_same_after_a_sleep(tmp_path: Path, level: SleepLevel) -> None:
    worker = make_worker(write_tiny_llama(tmp_path), num_blocks=20)
    worker.start()
    worker.initialize_kv_cache(20)
    before = worker.execute_model(prompt_step(1, "a", []))

    worker.sleep(level)
    worker.sleep(level)
    with pytest.raises(AssertionError):
        worker.execute_model(prompt_step(2, "b", []))
    worker.wake()
    worker.wake()

    # The request from before the sleep is taken out by the first step after it, as ever.
    after = worker.execute_model(prompt_step(2, "b", ["a"]))
    assert after.sampled_token_ids == before.sampled_token_ids
    worker.close()


def test_dropped_weights_come_from_the_checkpoint_again(tmp_path: Path) -> None:
    worker = make_worker(write_tiny_llama(tmp_path), num_blocks=20)
    worker.start()
    worker.initialize_kv_cache(20)
    worker.sleep(SleepLevel.HOST)
    worker.sleep(SleepLevel.DROP)
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")

    with pytest.raises(Exception, match="safetensors"):
        worker.wake()

    (tmp_path / "elsewhere").rename(tmp_path / "model.safetensors")
    worker.wake()
    assert worker.execute_model(prompt_step(1, "a", [])).request_ids == ["a"]
    worker.close()
