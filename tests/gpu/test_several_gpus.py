"""Ranks with a GPU each: their sums, bit for bit; graphs with the exchanges in them; a rank that dies."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.launch.bench.multi_gpu_steps import StepsPlan, measure_steps
from support.collective_checks import DTYPES, HOOK, SumsReport
from support.launch import Cluster, running_cluster
from support.tiny_models import TRAINED, write_tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PROMPTS = [[(7 * i + j * j) % 380 + 3 for j in range(3 + 5 * i)] for i in range(11)]
NUM_STREAMED, BACK_S = 400, 120.0
# Around the edges of a piece (8 KiB), of what is short, of what one kernel takes and what the other does; odd ones; a
# decode step's.
NUM_ELEMENTS = [
    *(1, 3, 96, 2047, 2048, 2049, 4096, 4097, 32768, 65536, 131072, 131073, 262144, 300001, 7),
    *((1 << 20) - 8, 1 << 20, (1 << 20) + 1, 3 << 20, 5 << 20),
]


@pytest.fixture(scope="module", autouse=True)
def opened_device() -> None:
    """Open what stays open: the driver's descriptors, also those of the first graph."""
    graph = torch.cuda.CUDAGraph()
    numbers = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        numbers.add_(1)
    graph.replay()
    torch.empty(1, pin_memory=True)
    torch.cuda.synchronize()


def open_llm(folder: Path, **settings: object) -> LLM:
    return LLM(
        str(folder),
        device="cuda",
        dtype="float32",
        num_blocks=256,
        max_num_seqs=16,
        skip_tokenizer_init=True,
        **settings,
    )


def generate(llm: LLM) -> list[list[int]]:
    params = [
        # Of different lengths, so that batches shrink; half are drawn; one row leaves the graphs for a filter.
        SamplingParams(
            temperature=[0.0, 0.8][index % 2], top_p=[1.0, 0.9][index == 5], seed=index, max_tokens=8 + 5 * index,
            ignore_eos=True, detokenize=False,
        )
        for index in range(len(PROMPTS))
    ]  # fmt: skip
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LLM]:
    """A replica on two GPUs with recorded decode steps."""
    with open_llm(TRAINED, tensor_parallel_size=2, hooks=(HOOK,)) as llm:
        yield llm


def test_sums_have_the_bits_of_a_sum_in_the_order_of_the_ranks_also_in_graphs(two_ranks: LLM) -> None:
    outcomes = two_ranks.collective_rpc(
        "check_sums",
        {"num_elements": NUM_ELEMENTS, "num_rounds": 5},
        result_type=SumsReport,
        timeout_s=60.0,
    )

    reports = []
    for outcome in outcomes:
        assert outcome.result is not None, outcome.error
        reports.append(outcome.result)
    assert [report.faults for report in reports] == [[], []]
    assert all(report.has_graphs for report in reports)
    assert len({report.bits for report in reports}) == 1
    num_rounds = 5 * len(DTYPES)
    assert reports[0].num_checked == num_rounds * len(NUM_ELEMENTS) + num_rounds * (len(NUM_ELEMENTS) + 1)
    if not reports[0].has_one_shot:
        pytest.skip(
            f"these GPUs do not map each other's memory; what was summed went through {reports[0].group}"
        )


def test_two_ranks_with_graphs_choose_the_tokens_of_one(two_ranks: LLM) -> None:
    made = generate(two_ranks)

    with open_llm(TRAINED) as alone:
        assert made == generate(alone)


@pytest.mark.parametrize("model", ["trained", "random"])
def test_graphs_on_and_off_agree_on_two_ranks(model: str, two_ranks: LLM, tmp_path: Path) -> None:
    folder = TRAINED if model == "trained" else write_tiny_llama(tmp_path)
    with open_llm(folder, tensor_parallel_size=2, enforce_eager=True) as eager:
        expected = generate(eager)
    if model == "trained":
        assert generate(two_ranks) == expected
    else:
        with open_llm(folder, tensor_parallel_size=2) as recorded:
            assert generate(recorded) == expected


def test_a_killed_rank_comes_back_and_its_streams_end_as_if_nothing_had_been(tmp_path: Path) -> None:
    arguments = [
        "--device",
        "cuda",
        "--tp",
        "2",
        "--dtype",
        "float32",
        "--set",
        "cache.memory_utilization=0.3",
    ]
    with running_cluster(tmp_path, str(TRAINED), "--served-model-name", "tiny", *arguments) as cluster:
        undisturbed = stream_all(cluster)
        victim = cluster.worker_pid(0, 1)

        texts = stream_all(cluster, lambda: os.kill(victim, signal.SIGKILL))

        assert texts == undisturbed
        assert "dp0 tp1 was killed by signal 9" in cluster.stderr
        assert cluster.worker_pid(0, 1) != victim
        assert stream_all(cluster) == undisturbed


def stream_all(cluster: Cluster, strike: Callable[[], None] = lambda: None) -> list[str]:
    """Stream a completion of each prompt, all at once; call `strike` when all of them have had some pieces."""
    all_started = threading.Barrier(len(PROMPTS), strike)

    def stream(index: int) -> str:
        body = {
            "model": "tiny", "prompt": PROMPTS[index], "max_tokens": NUM_STREAMED, "stream": True,
            "temperature": [0.0, 0.8][index % 2], "seed": index, "ignore_eos": True,
        }  # fmt: skip
        pieces: list[str] = []
        url = f"{cluster.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=BACK_S) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                    if len(pieces) == 4:
                        all_started.wait(BACK_S)
        return "".join(pieces)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(stream, range(len(PROMPTS))))


def test_a_profile_of_the_steps_has_every_sum() -> None:
    plan = StepsPlan(requests=(1, 8), prompt_len=64, num_steps=16, num_recorded=6)

    measures = measure_steps(str(TRAINED), 2, plan, device="cuda", has_dummy_weights=False)

    assert [row.problem for row in measures.sums] == [""] * 6
    # Two in each of the two layers, and one of the embedding: in replayed graphs as in steps with prompts.
    assert {row.num_sums for row in measures.sums} == {5}
    assert all(set(row.ways) <= {"one-shot", "two-shot", "nccl"} for row in measures.sums)
    assert all(0 < row.least_us <= row.us and 0 <= row.overlap <= 1 for row in measures.sums)
    assert all(row.device_us.min > 0 and row.idle_us.min >= 0 for row in measures.host)
