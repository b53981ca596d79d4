"""LLM on real ranks: hooks on them, starts from odd places, and a rank that stands still."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from phalanx import LLM, SamplingParams
from phalanx.engine.errors import ReplicaLostError
from phalanx.shm.stack_dump import is_stopped
from phalanx.workers.memory_report import RankMemory
from support.children import is_gone, wait_until
from support.launch import TINY_MODEL

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_memory_of_every_rank_is_told_between_two_generations(num_ranks: int) -> None:
    with LLM(
        str(TINY_MODEL), tensor_parallel_size=num_ranks, device="cpu", num_blocks=64, num_threads=1
    ) as llm:
        before = llm.generate("Licensed", GREEDY)
        outcomes = llm.collective_rpc("memory_report", result_type=RankMemory)
        after = llm.generate("Licensed", GREEDY)

    assert before[0].outputs == after[0].outputs
    reports = [outcome.result for outcome in outcomes if outcome.result is not None]
    assert [report.tp_rank for report in reports] == list(range(num_ranks))
    for report, rank in zip(reports, llm.report.ranks, strict=True):
        assert report.pid == rank.pid
        assert report.model.weight_bytes == rank.weight_bytes > 0
        assert report.model.kv_cache_bytes == 64 * rank.kv_bytes_per_block
        assert report.model.device is None
        assert report.resident_bytes > rank.weight_bytes


def test_a_hook_in_this_process_that_fails_ends_its_call_only() -> None:
    with LLM(
        str(TINY_MODEL), device="cpu", num_blocks=64, num_threads=1, hooks=["support.hooks:fail_on"]
    ) as llm:
        (failed,) = llm.collective_rpc("fail_on", 0)
        (passed,) = llm.collective_rpc("fail_on", 1, result_type=int)
        with pytest.raises(ValueError, match="known are memory_report, sleep, wake, fail_on"):
            llm.collective_rpc("eval")

    assert failed.error == "ValueError: rank 0 was asked to fail"
    assert passed.result == 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_hook_reaches_the_model_of_its_rank(num_ranks: int) -> None:
    with LLM(
        str(TINY_MODEL),
        tensor_parallel_size=num_ranks,
        device="cpu",
        num_blocks=64,
        num_threads=1,
        hooks=["support.hooks:norm_of"],
    ) as llm:
        outcomes = llm.collective_rpc("norm_of", "norm.weight", result_type=float)

    norms = [outcome.result for outcome in outcomes]
    assert len(norms) == num_ranks
    assert norms[0] is not None
    assert norms[0] > 0
    # Every rank holds all of this one.
    assert len(set(norms)) == 1


def test_ranks_that_a_short_lived_thread_has_started_live_on() -> None:
    made: list[LLM] = []

    def start() -> None:
        made.append(LLM(str(TINY_MODEL), tensor_parallel_size=2, device="cpu", num_blocks=64, num_threads=1))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()

    with made[0] as llm:
        assert len(llm.generate("Licensed", GREEDY)[0].outputs[0].token_ids) == 4


def test_a_program_without_a_file_works_with_several_ranks() -> None:
    # As in a notebook: `__main__` has neither a file nor a guard that a child could use.
    program = (
        "from phalanx import LLM, SamplingParams\n"
        f"llm = LLM({str(TINY_MODEL)!r}, tensor_parallel_size=2, device='cpu', num_blocks=64, num_threads=1)\n"
        "print(len(llm.generate(['Hello'], SamplingParams(max_tokens=3, ignore_eos=True))))\n"
        "llm.close()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    done = subprocess.run(
        [sys.executable, "-"], input=program, capture_output=True, text=True, timeout=100, env=environment
    )

    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_a_program_that_is_killed_while_its_ranks_import_leaves_none(tmp_path: Path) -> None:
    told = tmp_path / "phases"
    program = f"""
        import json, os
        from pathlib import Path
        from phalanx.workers.config import *
        from phalanx.workers.executor import create_executor

        def tell(rank, phase):
            with open({str(told)!r}, "a") as file:
                print(json.dumps([rank, phase]), file=file)

        create_executor(
            model=ModelConfig(path={str(TINY_MODEL)!r}), cache=CacheConfig(num_blocks=16),
            parallel=ParallelConfig(tensor_parallel_size=2, device=DeviceType.CPU), executor=ExecutorConfig(),
            max_num_seqs=4, max_num_batched_tokens=64, on_phase=tell,
        ).start()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-c", _dedent(program)], env=environment)

    def are_importing() -> bool:
        lines = told.read_text().splitlines() if told.exists() else []
        return {tuple(json.loads(line)) for line in lines} >= {(0, "import"), (1, "import")}

    wait_until(are_importing, timeout_s=30.0, what="the import of both ranks")
    pids = [
        int(pid)
        for task in Path(f"/proc/{parent.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    parent.kill()
    parent.wait()

    assert len(pids) == 2
    wait_until(lambda: all(map(is_gone, pids)), timeout_s=5.0, what="the end of the ranks")


def test_a_stopped_rank_is_named_in_the_log_and_then_ends_the_replica(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LLM(
        str(TINY_MODEL),
        tensor_parallel_size=2,
        device="cpu",
        num_blocks=64,
        num_threads=1,
        stall_report_s=20.0,
        step_timeout_s=1.5,
    ) as llm:
        llm.generate("Licensed", GREEDY)
        stopped = llm.report.ranks[1].pid
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: is_stopped(stopped), timeout_s=10.0)
        with pytest.raises(ReplicaLostError, match=r"dp0 tp1 made no progress .* stopped by a signal"):
            llm.generate("Licensed", GREEDY)

    messages = [record.getMessage() for record in caplog.records]
    reports = [message for message in messages if f"pid={stopped}" in message]
    assert len(reports) == 1, messages
    # The other one waits for it in a collective: its stack says so.
    assert "all_reduce" in reports[0]


def _dedent(program: str) -> str:
    return "\n".join(line.removeprefix(" " * 8) for line in program.splitlines())
