"""MeasuredWorker: when it stops to measure."""

from typing import cast

import pytest
import torch
from torch.profiler import profile

from phalanx.workers import measured_worker
from phalanx.workers.config import CacheConfig, ModelConfig, ParallelConfig
from phalanx.workers.executor import make_worker_configs
from phalanx.workers.measured_worker import MeasuredWorker, Measurement, begin_measuring, end_measuring
from phalanx.workers.messages import SchedulerOutput
from phalanx.workers.step_measures import MeasurePlan
from phalanx.workers.timed_group import TimedGroup
from phalanx.workers.tp_group import SingleRankGroup
from support.tiny_models import TRAINED


class Recorder:
    """In the place of torch's profiler."""

    def __init__(self, activities: object = ()) -> None:
        self.is_running = False

    def start(self) -> None:
        self.is_running = True

    def stop(self) -> None:
        assert self.is_running
        self.is_running = False

    def events(self) -> list[object]:
        return []


@pytest.fixture
def worker() -> MeasuredWorker:
    """One that never started: its steps fail."""
    (config,) = make_worker_configs(
        model=ModelConfig(path=str(TRAINED)),
        cache=CacheConfig(),
        parallel=ParallelConfig(),
        max_num_seqs=1,
        max_num_batched_tokens=1,
    )
    worker = MeasuredWorker(config, lambda phase: None)
    worker._group = SingleRankGroup()
    worker._device = torch.device("cpu")
    return worker


def record(worker: MeasuredWorker, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Begin to measure two steps as on a GPU."""
    monkeypatch.setattr(measured_worker, "profile", Recorder)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    worker._device = torch.device("cuda")
    begin_measuring(worker, MeasurePlan(max_steps=2, with_sums=True))
    recorder = cast(Recorder, worker.recorder)
    assert recorder.is_running
    # Its marks are then the host's.
    worker._device = torch.device("cpu")
    return recorder


def step(number: int) -> SchedulerOutput:
    return SchedulerOutput(
        step=number,
        new_requests=[],
        num_scheduled_tokens={"a": 1},
        num_computed_tokens=[4],
        removed_request_ids=[],
    )


def test_a_step_that_fails_ends_the_profiler(worker: MeasuredWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = record(worker, monkeypatch)

    with pytest.raises(AssertionError, match="comes first"):
        worker.begin_step(step(1))

    assert not recorder.is_running
    assert worker.recorder is None


def test_a_forgotten_profiler_ends_after_the_steps_that_were_asked_for(
    worker: MeasuredWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = record(worker, monkeypatch)
    measurement = worker.measurement
    assert measurement is not None

    for number in range(2):
        assert measurement.wants_more
        measurement.clocks.append(measured_worker._StepClock(number, worker.device))

    assert not measurement.wants_more
    assert not recorder.is_running
    assert len(end_measuring(worker, None).steps) == 2
    assert worker.recorder is None


def test_two_measurements_at_once_are_refused(worker: MeasuredWorker) -> None:
    with pytest.raises(RuntimeError, match="no measurement"):
        end_measuring(worker, None)
    begin_measuring(worker, MeasurePlan(max_steps=1))
    with pytest.raises(RuntimeError, match="under way already"):
        begin_measuring(worker, MeasurePlan(max_steps=1))


def test_a_measurement_and_a_trace_are_not_made_together(
    worker: MeasuredWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker._device = torch.device("cuda")
    worker.recorder = cast(profile, Recorder())

    with pytest.raises(RuntimeError, match="a trace is being recorded"):
        begin_measuring(worker, MeasurePlan(max_steps=1, with_sums=True))


def test_on_the_host_sums_are_timed_until_the_plans_last_step(worker: MeasuredWorker) -> None:
    group = TimedGroup(SingleRankGroup())
    worker._group = group
    x = torch.ones(2)
    group.all_reduce(x)
    measurement = worker.measurement = Measurement(worker, MeasurePlan(max_steps=1, with_sums=True))

    assert group.all_reduce(x) is x
    group.all_gather_last_dim(x, [2])
    measurement.clocks.append(measured_worker._StepClock(1, worker.device))
    assert not measurement.wants_more
    group.all_reduce(x)

    found = end_measuring(worker, None)
    assert [(one.way, one.us > 0, one.overlapped_us) for one in found.sums] == [("none", True, 0.0)]
    assert found.gather_us > 0
