"""What a worker reports, how it sizes its KV cache, and the executor of one rank in process."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from torch import bfloat16

from phalanx.shm.errors import ConfigError
from phalanx.shm.status_board import Phase
from phalanx.workers.config import CacheConfig, LoadFormat, ModelConfig, ParallelConfig
from phalanx.workers.errors import DeviceMemoryError
from phalanx.workers.kv_cache_groups import KVCacheGroup
from phalanx.workers.memory import KVCacheShape, count_kv_blocks
from phalanx.workers.messages import GrammarMasks, NewRequest, SchedulerOutput
from phalanx.workers.sampling_params import SamplingParams
from phalanx.workers.uniproc_executor import UniprocExecutor
from phalanx.workers.worker_config import WorkerConfig
from support.model_steps import make_worker
from support.tiny_models import write_tiny_llama

GROUPS = (KVCacheGroup(window=None, layers=(0, 1)),)
SHAPE = KVCacheShape(groups=GROUPS, block_size=16, num_kv_heads=3, head_size=64, dtype=bfloat16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path)


def make_config(folder: Path, *, tp_size: int = 1, num_blocks: int | None = 20) -> WorkerConfig:
    return WorkerConfig(
        model=ModelConfig(path=str(folder), max_model_len=100),
        cache=CacheConfig(num_blocks=num_blocks),
        parallel=ParallelConfig(tensor_parallel_size=tp_size, num_threads=1),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        tp_rank=0,
        device_index=0,
        rendezvous=None,
    )


def one_step(token_ids: list[int], step: int = 1) -> SchedulerOutput:
    request = NewRequest(
        request_id="a",
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=0,
        block_ids=[1],
        sampling_params=SamplingParams(temperature=0.0),
        seed=0,
    )
    return SchedulerOutput(
        step=step,
        new_requests=[request],
        num_scheduled_tokens={"a": len(token_ids)},
        num_computed_tokens=[0],
        removed_request_ids=[],
    )


def test_a_worker_tells_its_phases_and_reports_them(folder: Path) -> None:
    seen: list[str] = []
    worker = make_worker(folder, num_blocks=None, max_num_seqs=3, on_phase=seen.append)

    report = worker.start()
    worker.initialize_kv_cache(report.num_kv_blocks)
    worker.execute_model(one_step([5, 6, 7]))

    assert [phase.name for phase in report.phases] == ["device", "process group", "weights", "profile"]
    assert seen == [
        "device",
        "process group",
        "weights",
        "profile",
        "KV cache",
        "input",
        "forward",
        "sampling",
    ]
    assert all(Phase.named(name) is not Phase.OTHER for name in seen)
    assert (report.device, report.dtype, report.attention_backend) == ("cpu", "float32", "torch")
    assert report.collectives == "none"
    assert report.kv_bytes_per_block == 2 * 2 * 16 * 3 * 16 * 4
    assert report.num_kv_blocks == 3 * 512 // 16 + 1
    worker.close()
    worker.close()


def test_blocks_fill_the_room_up_to_what_can_be_used() -> None:
    cache = CacheConfig()

    room = 100 * SHAPE.bytes_per_block + 5
    few = count_kv_blocks(cache, SHAPE, room_bytes=room, max_num_seqs=256, max_model_len=8192)
    capped = count_kv_blocks(cache, SHAPE, room_bytes=1 << 40, max_num_seqs=2, max_model_len=100)
    forced = count_kv_blocks(
        CacheConfig(num_blocks=7), SHAPE, room_bytes=0, max_num_seqs=2, max_model_len=100
    )

    assert (few, capped, forced) == (100, 2 * 7 + 1, 7)


def test_no_room_for_a_block_says_what_to_change() -> None:
    with pytest.raises(DeviceMemoryError, match=r"cache\.memory_utilization"):
        count_kv_blocks(CacheConfig(), SHAPE, room_bytes=1000, max_num_seqs=1, max_model_len=16)


def test_dummy_weights_need_no_checkpoint(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    worker = make_worker(folder, load_format=LoadFormat.DUMMY)

    worker.start()
    worker.initialize_kv_cache(4)

    assert worker.execute_model(one_step([5, 6])).request_ids == ["a"]
    worker.close()


def test_the_executor_in_process_runs_steps(folder: Path) -> None:
    phases: list[tuple[int, str]] = []
    executor = UniprocExecutor(make_config(folder), on_phase=lambda rank, name: phases.append((rank, name)))

    report = executor.start()
    pending = executor.submit_model(one_step([5, 6, 7], step=9))

    assert (report.num_kv_blocks, report.block_size, report.max_model_len, report.vocab_size) == (
        20,
        16,
        100,
        384,
    )
    assert (0, "weights") in phases
    assert (0, "forward") not in phases
    assert pending.result().step == 9
    assert (executor.phases[0].phase, executor.phases[0].step) == (Phase.IDLE, 9)
    executor.close(reason="test")
    executor.close(reason="test")


def test_in_process_a_step_with_a_grammar_is_computed_when_its_masks_come(folder: Path) -> None:
    executor = UniprocExecutor(make_config(folder))
    executor.start()
    only = np.zeros(384 // 32, dtype=np.uint32)
    only[123 // 32] = 1 << 123 % 32
    step = executor.submit_model(msgspec.structs.replace(one_step([5, 6, 7]), needs_masks=True))
    assert not step.is_done

    executor.submit_masks(GrammarMasks(step=1, request_ids=["a"], bits=only.tobytes()))

    assert step.is_done
    assert step.result().sampled_token_ids == [123]
    executor.close(reason="test")


def test_a_failed_step_closes_the_executor(folder: Path) -> None:
    executor = UniprocExecutor(make_config(folder))
    executor.start()
    executor.execute_model(one_step([5]))

    with pytest.raises(RuntimeError, match="held here already"):
        executor.execute_model(one_step([5]))
    with pytest.raises(AssertionError, match="not running"):
        executor.execute_model(one_step([5]))


def test_the_executor_in_process_refuses_several_ranks(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tensor_parallel_size"):
        UniprocExecutor(make_config(folder, tp_size=2))
