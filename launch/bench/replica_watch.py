"""ReplicaWatch: what each replica of a served cluster had to do during a run, by the cluster's own metrics.

Called by: multi_gpu_dp.py; routing/real_chats.py reads the same metrics. It asks from a thread of its own while the
load runs: replicas report ten times a second. A question that is not answered is left out.
"""

import re
import statistics
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from .errors import BenchError
from .report import Table, show_number

T = TypeVar("T")

ASK_EVERY_S = 0.1
MAX_SAMPLES = 40
SETTLE_TIMEOUT_S = 10.0
"""Replicas report what they did when they come to rest, a moment after the last answer."""
_ASK_TIMEOUT_S = 5.0
_SERIES = {
    "num_running": "phalanx_num_requests_running",
    "num_waiting": "phalanx_num_requests_waiting",
    "prefill_tokens": "phalanx_engine_prefill_tokens_total",
    "output_tokens": "phalanx_engine_output_tokens_total",
    "num_steps": "phalanx_engine_steps_total",
    "num_preemptions": "phalanx_num_preemptions_total",
    "busy_s": "phalanx_engine_busy_seconds_total",
}


class ReplicaSample(msgspec.Struct, frozen=True, kw_only=True):
    """What the metrics said of one replica at one instant.

    at_s:                     since the watch began
    num_running, num_waiting: requests just then; all others are counters
    prefill_tokens:           of prompts, computed; busy_s: with a step in flight
    """

    at_s: float = 0.0
    num_running: int
    num_waiting: int
    prefill_tokens: int
    output_tokens: int
    num_steps: int
    num_preemptions: int
    busy_s: float


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica had to do in a run.

    num_requests:             by the output tokens, of which all requests have equally many
    max_running, max_waiting: that any sample has
    prompt_step_tokens:       of prompts in a step, median over the pairs of samples between which there were prompts
    prompt_s:                 between such pairs
    busy_s:                   with a step in flight
    samples:                  of the run, counters as they stood; about MAX_SAMPLES of them, in even steps
    """

    dp_rank: int
    num_requests: float
    max_running: int
    max_waiting: int
    num_steps: int
    prefill_tokens: int
    prompt_step_tokens: float
    prompt_s: float
    num_preemptions: int
    busy_s: float
    samples: list[ReplicaSample]


class ReplicaWatch:
    """Watches the cluster at `url` inside a `with` block. The metrics of all `num_replicas` are there already.

    `loads` afterwards. Raises BenchError on entering when the cluster says nothing of a replica.
    """

    def __init__(self, url: str, num_replicas: int) -> None:
        self._url = url
        self._num_replicas = num_replicas
        self._samples: dict[int, list[ReplicaSample]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="replica-watch")
        self._began_at = 0.0

    def __enter__(self) -> Self:
        self._began_at = time.monotonic()
        deadline_at = self._began_at + SETTLE_TIMEOUT_S
        while not self._ask():
            if time.monotonic() > deadline_at:
                raise BenchError(f"the metrics do not tell of {self._num_replicas} replicas")
            self._is_over.wait(ASK_EVERY_S)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def loads(self, *, num_output_tokens: int, output_len: int) -> list[ReplicaLoad]:
        """Say what each replica had to do, when all have reported `num_output_tokens`, or after SETTLE_TIMEOUT_S.

        output_len: tokens of each request. To be called after the block.
        """
        deadline_at = time.monotonic() + SETTLE_TIMEOUT_S
        while self._num_counted() < num_output_tokens and time.monotonic() < deadline_at:
            time.sleep(ASK_EVERY_S)
            self._ask()
        return [
            load_of(dp_rank, samples, output_len=output_len)
            for dp_rank, samples in sorted(self._samples.items())
        ]

    def _watch(self) -> None:
        while not self._is_over.wait(ASK_EVERY_S):
            self._ask()

    def _ask(self) -> bool:
        """Take a sample of every replica. False when the cluster did not tell of all."""
        at_s = time.monotonic() - self._began_at
        try:
            with urllib.request.urlopen(f"{self._url}/metrics", timeout=_ASK_TIMEOUT_S) as response:
                samples = parse_samples(response.read().decode(), at_s)
        except OSError:
            return False
        if set(samples) != set(range(self._num_replicas)):
            return False
        for dp_rank, sample in samples.items():
            self._samples.setdefault(dp_rank, []).append(sample)
        return True

    def _num_counted(self) -> int:
        return sum(samples[-1].output_tokens - samples[0].output_tokens for samples in self._samples.values())


def parse_samples(text: str, at_s: float) -> dict[int, ReplicaSample]:
    """Read the replicas' samples out of Prometheus's text, by dp_rank. Pure. Raises BenchError as `parse_series`."""
    return {
        dp_rank: msgspec.structs.replace(sample, at_s=at_s)
        for dp_rank, sample in parse_series(text, _SERIES, ReplicaSample).items()
    }


def parse_series(text: str, series: Mapping[str, str], kind: type[T]) -> dict[int, T]:
    """Read some series out of Prometheus's text, into one `kind` for each dp_rank. Pure.

    series: by field of `kind`. Raises BenchError when one is missing.
    """
    found: dict[int, dict[str, float]] = {}
    for field, name in series.items():
        for rank, value in re.findall(rf'^{name}\{{[^}}]*dp_rank="(\d+)"[^}}]*\}} (\S+)$', text, re.M):
            number = float(value)
            found.setdefault(int(rank), {})[field] = int(number) if number.is_integer() else number
    try:
        return {rank: msgspec.convert(fields, kind) for rank, fields in sorted(found.items())}
    except msgspec.ValidationError as error:
        raise BenchError(f"the metrics of the server lack a series: {error}") from None


def load_of(dp_rank: int, samples: Sequence[ReplicaSample], *, output_len: int) -> ReplicaLoad:
    """Say what the samples of one replica tell, the first of which precedes the load. Pure."""
    first, last = samples[0], samples[-1]
    with_prompts = [
        (before, after) for before, after in pairwise(samples) if after.prefill_tokens > before.prefill_tokens
    ]
    return ReplicaLoad(
        dp_rank=dp_rank,
        num_requests=(last.output_tokens - first.output_tokens) / output_len,
        max_running=max(sample.num_running for sample in samples),
        max_waiting=max(sample.num_waiting for sample in samples),
        num_steps=last.num_steps - first.num_steps,
        prefill_tokens=last.prefill_tokens - first.prefill_tokens,
        prompt_step_tokens=statistics.median(
            (after.prefill_tokens - before.prefill_tokens) / max(1, after.num_steps - before.num_steps)
            for before, after in with_prompts
        )
        if with_prompts
        else 0.0,
        prompt_s=sum(after.at_s - before.at_s for before, after in with_prompts),
        num_preemptions=last.num_preemptions - first.num_preemptions,
        busy_s=last.busy_s - first.busy_s,
        samples=list(samples[:: -(-len(samples) // MAX_SAMPLES)]),
    )


def make_table(runs: Mapping[str, Sequence[ReplicaLoad]]) -> Table:
    """Lay out the replicas of some runs, by what each run is called."""
    return Table(
        title="What each replica had to do",
        columns=[
            *("run, replica", "requests", "most running", "most waiting", "steps", "prompt tokens"),
            *("of them in a step", "seconds with prompts", "preempted", "busy s"),
        ],
        rows=[
            [
                f"{name}, {load.dp_rank}",
                f"{load.num_requests:g}",
                str(load.max_running),
                str(load.max_waiting),
                str(load.num_steps),
                str(load.prefill_tokens),
                show_number(load.prompt_step_tokens),
                show_number(load.prompt_s),
                str(load.num_preemptions),
                show_number(load.busy_s),
            ]
            for name, loads in runs.items()
            for load in loads
        ],
        note=f"By the cluster's metrics, asked every {ASK_EVERY_S:g} s. Requests: output tokens by those of a request, "
        "the clients' warm-up included. "
        "Of them in a step: median over the intervals in which there were prompts; short of the largest step, since an "
        "interval has others, too.",
    )
