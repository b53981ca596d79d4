"""One data parallel width, served: the texts that it gives, and how many tokens a second go through its front end.

Called by: multi_gpu.py. The cluster is started by `cluster-launch`; the load comes from `cluster-bench serve` in a
process of its own, so that client and benchmark do not share an interpreter. Raises BenchError.
"""

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

SERVE_TIMEOUT_S = 540.0
_MAX_LAST_WORDS = 2000


class ServePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Load for each replica: requests in a run, at once, and their lengths in tokens."""

    num_requests: int
    concurrency: int
    input_len: int
    output_len: int
    repetitions: int


class DataParallelRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run at one width. ready_s: of the cluster's start."""

    width: int
    run: int
    output_tokens_per_s: float
    ttft_p50_ms: float
    num_failed: int
    ready_s: float


class _Latency(msgspec.Struct, frozen=True):
    p50: float


class _ServeRun(msgspec.Struct, frozen=True):
    run: int
    num_requests: int
    num_completed: int
    output_tokens_per_s: float
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
    """Serve `folder` with `width` replicas, and load them with `plan`, each. scratch: a folder for the report."""
    arguments = _launch(folder, width, device, max_model_len=plan.input_len + plan.output_len)
    if has_dummy_weights:
        arguments += ["--set", "model.load_format=dummy"]
    stem = scratch / f"dp{width}"
    with LaunchedCluster(arguments) as cluster:
        command = [sys.executable, "-m", "phalanx.launch.bench", "serve", "--url", f"dp={cluster.url}"]
        command += ["--num-requests", str(plan.num_requests * width)]
        command += ["--concurrency", str(plan.concurrency * width), "--repetitions", str(plan.repetitions)]
        command += ["--input-len", str(plan.input_len), "--output-len", str(plan.output_len)]
        command += ["--vocab-size", str(read_transformer_config(str(folder)).vocab_size), "--out", str(stem)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SERVE_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise BenchError(
            f"cluster-bench serve ended with {done.returncode}: {done.stderr[-_MAX_LAST_WORDS:]}"
        )
    report = msgspec.json.decode(Path(f"{stem}.json").read_bytes(), type=_ServeReport)
    return [
        DataParallelRun(
            width=width,
            run=run.run,
            output_tokens_per_s=run.output_tokens_per_s,
            ttft_p50_ms=run.ttft.p50,
            num_failed=run.num_requests - run.num_completed,
            ready_s=cluster.ready_s,
        )
        for run in report.runs
    ]


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
