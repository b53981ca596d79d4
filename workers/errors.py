"""Errors of the workers: raised in a worker process, seen by the engine core as `detail` of a `ProcessError`."""

from ..shm.errors import ServingError


class WorkerError(ServingError):
    """Something about one rank's device, weights or model."""


class DeviceMemoryError(WorkerError):
    """The weights and one step leave no room for a KV cache. Says what to change."""


class GraphError(WorkerError):
    """A step could not be recorded as a CUDA graph. Says why, and how to do without."""


class WeightsError(WorkerError):
    """A checkpoint lacks a tensor, has one too many, or has one of another shape. Names the tensor."""
