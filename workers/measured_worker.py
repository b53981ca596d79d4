"""MeasuredWorker: the worker that serves, with clocks: of its steps, and of the sums over the ranks in them.

Called by: worker_proc.py, by name, in processes that a benchmark starts; its hooks, by hooks.py.
Between the hooks "begin_measuring" and "end_measuring" it stamps every step, and when asked records its kernels:

    on a GPU   two events around each step on the stream; kernels by torch.profiler, which also sees inside CUDA graphs
    on CPU     the host's clock, around the step and around each collective (timed_group.py)

Memory is bounded by the plan's number of steps. When a step fails the profiler is ended before the error goes on.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .messages import GrammarMasks, ModelRunnerOutput, SchedulerOutput
from .model_runner import no_masks
from .models.causal_lm import CausalLM
from .nccl_group import NcclGroup
from .step_in_flight import StepInFlight
from .step_measures import DeviceTimes, Kernel, MeasurePlan, RankMeasures, StepTimes, SumTime, sort_kernels
from .timed_group import TimedGroup
from .worker import Worker

COPIES = ("Memcpy", "Memset")
"""What a profiler calls what is no kernel: it may run beside any, and computes nothing."""


class MeasuredWorker(Worker):
    """See the module. measurement: under way; None: there is none."""

    measurement: "Measurement | None" = None

    def _build_model(self) -> CausalLM:
        group = self.group
        if group.size > 1 and not group.can_be_recorded and not isinstance(group, TimedGroup):
            self._group = TimedGroup(group)
        return super()._build_model()

    def begin_step(
        self, scheduler_output: SchedulerOutput, receive_masks: Callable[[], GrammarMasks] = no_masks
    ) -> StepInFlight:
        measurement = self.measurement
        if measurement is None or not measurement.wants_more or not scheduler_output.num_scheduled_tokens:
            return super().begin_step(scheduler_output, receive_masks)
        clock = _StepClock(scheduler_output.step, self.device)
        try:
            step = super().begin_step(scheduler_output, receive_masks)
        except BaseException:
            measurement.abandon()
            raise
        clock.launched()
        measurement.clocks.append(clock)
        return _ClockedStep(step, clock, measurement)


def begin_measuring(worker: MeasuredWorker, argument: MeasurePlan) -> None:
    """Measure the steps that come. Raises RuntimeError when a measurement or a trace is under way already."""
    if worker.measurement is not None:
        raise RuntimeError("a measurement is under way already")
    worker.measurement = Measurement(worker, argument)


def end_measuring(worker: MeasuredWorker, argument: None) -> RankMeasures:
    """Say what was measured. Raises RuntimeError when nothing is."""
    measurement, worker.measurement = worker.measurement, None
    if measurement is None:
        raise RuntimeError("no measurement is under way")
    return measurement.end()


class Measurement:
    """What one rank has measured since `begin_measuring`. One thread, the worker's.

    clocks: of the steps, in their order
    """

    def __init__(self, worker: MeasuredWorker, plan: MeasurePlan) -> None:
        self.clocks: list[_StepClock] = []
        self._worker = worker
        self._plan = plan
        self._is_recording = plan.with_sums
        self._on_host: tuple[list[SumTime], float] = ([], 0.0)
        self._recorder: profile | None = None
        if not plan.with_sums:
            return
        group = worker.group
        if isinstance(group, TimedGroup):
            group.begin()
        elif worker.device.type == "cuda":
            if worker.recorder is not None:
                raise RuntimeError("a trace is being recorded already")
            recorder = profile(activities=[ProfilerActivity.CUDA])
            recorder.start()
            # There, too, so that no trace of step_trace.py begins meanwhile.
            self._recorder = worker.recorder = recorder

    @property
    def wants_more(self) -> bool:
        """False when as many steps were measured as were asked for; then nothing records any more."""
        if len(self.clocks) < self._plan.max_steps:
            return True
        # A profiler keeps every kernel until it is ended.
        self._stop()
        return False

    def abandon(self) -> None:
        """End what records, and forget it: a step has failed."""
        is_recording, self._is_recording = self._is_recording, False
        recorder = self._take_recorder()
        if is_recording and recorder is not None:
            # What has failed may be the device; it is the first error that must be heard.
            with suppress(RuntimeError):
                recorder.stop()

    def end(self) -> RankMeasures:
        """Wait for the device, and say what it did."""
        worker = self._worker
        if worker.device.type == "cuda":
            # The last mark of a step lies behind its tokens.
            torch.cuda.synchronize(worker.device)
        steps = _step_times(self.clocks)
        self._stop()
        recorder = self._take_recorder()
        if recorder is not None:
            exchanges = worker.group.exchange_kernels if isinstance(worker.group, NcclGroup) else {}
            times = sort_kernels(device_kernels(recorder), exchanges)
        else:
            times = DeviceTimes(*self._on_host, busy_us=sum(step.device_us for step in steps))
        return RankMeasures(
            tp_rank=worker.tp_rank,
            steps=steps,
            sums=times.sums,
            gather_us=times.gather_us,
            busy_us=times.busy_us if self._plan.with_sums else None,
        )

    def _stop(self) -> None:
        """Record no more; what was recorded is kept."""
        if not self._is_recording:
            return
        self._is_recording = False
        worker = self._worker
        if isinstance(worker.group, TimedGroup):
            self._on_host = worker.group.end()
        if self._recorder is not None:
            torch.cuda.synchronize(worker.device)
            self._recorder.stop()

    def _take_recorder(self) -> profile | None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            self._worker.recorder = None
        return recorder


def device_kernels(recorder: profile) -> list[Kernel]:
    """Return the kernels that a profiler has seen on its process's device; the profiler is stopped."""
    events = recorder.events() or ()
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(COPIES)
    ]


@dataclass(slots=True)
class _Mark:
    """An instant on the host, and on the stream of a GPU when there is one."""

    at: float
    event: torch.cuda.Event | None

    @classmethod
    def now(cls, device: torch.device) -> "_Mark":
        event = None
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return cls(time.monotonic(), event)

    def us_since(self, earlier: "_Mark") -> float:
        if self.event is None or earlier.event is None:
            return 1e6 * (self.at - earlier.at)
        return 1e3 * earlier.event.elapsed_time(self.event)


class _StepClock:
    """The marks of one step. Made when the rank has decoded it. done_at: 0.0 until it is done."""

    def __init__(self, step: int, device: torch.device) -> None:
        self.step = step
        self.done_at = 0.0
        self._device = device
        self.begin = _Mark.now(device)
        self.end = self.begin

    def launched(self) -> None:
        """All that the step computes is on its way; on CPU it is done."""
        self.end = _Mark.now(self._device)


def _step_times(clocks: list[_StepClock]) -> list[StepTimes]:
    """Read the marks of steps, all of which are done."""
    return [
        StepTimes(
            step=clock.step,
            received_at=clock.begin.at,
            done_at=clock.done_at,
            device_us=clock.end.us_since(clock.begin),
            idle_us=None if before is None else clock.begin.us_since(before.end),
        )
        for before, clock in zip([None, *clocks], clocks, strict=False)
    ]


class _ClockedStep:
    """See StepInFlight."""

    def __init__(self, step: StepInFlight, clock: _StepClock, measurement: Measurement) -> None:
        self._step = step
        self._clock = clock
        self._measurement = measurement

    @property
    def is_done(self) -> bool:
        return self._step.is_done

    def wait(self) -> ModelRunnerOutput:
        try:
            output = self._step.wait()
        except BaseException:
            self._measurement.abandon()
            raise
        if not self._clock.done_at:
            self._clock.done_at = time.monotonic()
        return output
