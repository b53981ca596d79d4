"""One data parallel width, served: the texts that it gives, and how many tokens a second go through its front end.

Called by: multi_gpu.py. The cluster is started by `cluster-launch`; the load comes from processes of `cluster-bench
serve`, one for each replica, so that the clients are not what is measured. Raises BenchError.
"""

import statistics
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ...workers.transformer_config import read_transformer_config
from .errors import BenchError
from .launched_cluster import LaunchedCluster
from .offline_workload import OfflineWorkload
from .replica_watch import ReplicaLoad, ReplicaWatch

SERVE_TIMEOUT_S = 540.0
NUM_WARM_UP = 4
"""Requests of each client before those that are measured; replicas do not tell them apart."""
_MAX_LAST_WORDS = 2000


class ServePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Load for each replica: requests in a run, at once, and their lengths in tokens; and its API servers."""

    num_api_servers: int
    num_requests: int
    concurrency: int
    input_len: int
    output_len: int
    repetitions: int


class DataParallelRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run at one width, all clients together.

    output_tokens_per_s: by the time of the client that took longest
    ttft_p50_ms:         median of the clients' medians
    ready_s:             of the cluster's start
    replicas:            what each of them had to do, the clients' NUM_WARM_UP requests included
    """

    width: int
    run: int
    output_tokens_per_s: float
    ttft_p50_ms: float
    num_failed: int
    ready_s: float
    replicas: list[ReplicaLoad] = []


class _Latency(msgspec.Struct, frozen=True):
    p50: float


class _ServeRun(msgspec.Struct, frozen=True):
    num_requests: int
    num_completed: int
    num_output_tokens: int
    duration_s: float
    ttft: _Latency


class _Completion(msgspec.Struct, frozen=True):
    class Choice(msgspec.Struct, frozen=True):
        text: str

    choices: list[Choice]


class _ServeReport(msgspec.Struct, frozen=True):
    runs: list[_ServeRun]


def completion_texts(folder: Path, width: int, workload: OfflineWorkload, *, device: str) -> list[str]:
    """Serve `folder` in float32 with `width` replicas, and complete all prompts of `workload` at once, greedily."""
    arguments = _launch(folder, width, device, max_model_len=workload.max_len)
    with LaunchedCluster([*arguments, "--dtype", "float32"]) as cluster:
        requests = list(zip(workload.prompts, workload.output_lens, strict=True))
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda request: _complete(cluster.url, *request), requests))


def measure_data_parallel(
    folder: Path, width: int, plan: ServePlan, *, device: str, has_dummy_weights: bool, scratch: Path
) -> list[DataParallelRun]:
    """Serve `folder` with `width` replicas, and load them with `plan`, each. scratch: a folder for the reports."""
    arguments = _launch(folder, width, device, max_model_len=plan.input_len + plan.output_len)
    arguments += ["--api-servers", str(plan.num_api_servers * width)]
    if has_dummy_weights:
        arguments += ["--set", "model.load_format=dummy"]
    vocab_size = read_transformer_config(str(folder)).vocab_size
    with LaunchedCluster(arguments) as cluster:
        loads = []
        for number in range(plan.repetitions):
            # No prompt comes twice: no prefix cache answers for another client, or for a run before.
            seeds = range(number * width, (number + 1) * width)
            commands = [
                [*_load_command(cluster.url, plan, vocab_size, seed), "--out", str(scratch / f"client{seed}")]
                for seed in seeds
            ]
            with ReplicaWatch(cluster.url, width) as watch, ThreadPoolExecutor(width) as pool:
                list(pool.map(_run_load, commands))
            runs = [_read_load(scratch / f"client{seed}.json") for seed in seeds]
            num_output_tokens = sum(run.num_output_tokens for run in runs)
            replicas = watch.loads(
                num_output_tokens=num_output_tokens + width * NUM_WARM_UP * plan.output_len,
                output_len=plan.output_len,
            )
            loads.append((runs, replicas))
    return [
        DataParallelRun(
            width=width,
            run=number,
            output_tokens_per_s=sum(run.num_output_tokens for run in runs)
            / max(run.duration_s for run in runs),
            ttft_p50_ms=statistics.median(run.ttft.p50 for run in runs),
            num_failed=sum(run.num_requests - run.num_completed for run in runs),
            ready_s=cluster.ready_s,
            replicas=replicas,
        )
        for number, (runs, replicas) in enumerate(loads)
    ]


def _load_command(url: str, plan: ServePlan, vocab_size: int, seed: int) -> list[str]:
    command = [sys.executable, "-m", "phalanx.launch.bench", "serve", "--url", f"dp={url}"]
    command += ["--num-requests", str(plan.num_requests), "--concurrency", str(plan.concurrency)]
    command += ["--input-len", str(plan.input_len), "--output-len", str(plan.output_len)]
    command += ["--repetitions", "1", "--warmup", str(NUM_WARM_UP)]
    return [*command, "--vocab-size", str(vocab_size), "--seed", str(seed)]


def _run_load(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SERVE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"cluster-bench serve did not end in {SERVE_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise BenchError(
            f"cluster-bench serve ended with {done.returncode}: {done.stderr[-_MAX_LAST_WORDS:]}"
        )


def _read_load(report: Path) -> _ServeRun:
    return msgspec.json.decode(report.read_bytes(), type=_ServeReport).runs[0]


def _launch(folder: Path, width: int, device: str, *, max_model_len: int) -> list[str]:
    return [str(folder), "--dp", str(width), "--device", device, "--max-model-len", str(max_model_len)]


def _complete(url: str, prompt: list[int], num_tokens: int) -> str:
    fields = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=msgspec.json.encode(fields),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=SERVE_TIMEOUT_S) as response:
            return msgspec.json.decode(response.read(), type=_Completion).choices[0].text
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchError(f"a prompt was not completed: {error}") from error
