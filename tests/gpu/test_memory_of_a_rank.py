"""What a rank holds of its card: given back in its sleep, and waited for after a death."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from phalanx.workers.config import DeviceType, ParallelConfig
from phalanx.workers.memory_wait import SLACK_BYTES
from phalanx.workers.sleep import SleepLevel
from phalanx.workers.worker import Worker
from support.model_steps import make_worker, prompt_step
from support.tiny_models import write_tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

CUDA = ParallelConfig(device=DeviceType.CUDA)
HOLD = """
import sys, torch
held = torch.ones(8 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("level", SleepLevel)
def test_a_sleep_gives_the_memory_of_cache_and_weights_back(tmp_path: Path, level: SleepLevel) -> None:
    worker = make_worker(write_tiny_llama(tmp_path), parallel=CUDA, num_blocks=20000)
    worker.start()
    worker.initialize_kv_cache(20000)
    before = worker.execute_model(prompt_step(1, "a", []))
    awake = torch.cuda.memory_allocated()
    cache_bytes = worker.model_memory().kv_cache_bytes
    assert awake > cache_bytes > 64 << 20

    worker.sleep(level)
    asleep = torch.cuda.memory_allocated()
    worker.wake()

    assert asleep <= awake - cache_bytes
    assert worker.execute_model(prompt_step(2, "b", ["a"])).sampled_token_ids == before.sampled_token_ids
    assert torch.cuda.memory_allocated() <= awake + (1 << 20)
    worker.close()


def test_a_rank_that_starts_again_waits_for_the_memory_of_the_dead_one(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    free_bytes = torch.cuda.mem_get_info()[0]
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert torch.cuda.mem_get_info()[0] < free_bytes - SLACK_BYTES
        config = make_worker(write_tiny_llama(tmp_path), parallel=CUDA)._config
        worker = Worker(msgspec.structs.replace(config, expected_free_bytes=free_bytes), lambda name: None)
        killer = threading.Timer(1.0, holder.send_signal, [signal.SIGKILL])
        killer.start()

        report = worker.start()

        assert report.free_bytes is not None
        assert report.free_bytes >= free_bytes - SLACK_BYTES
        assert holder.wait(10) == -signal.SIGKILL
    worker.close()
