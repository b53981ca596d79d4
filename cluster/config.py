"""The section of a cluster: how many replicas and front ends, and how long to wait for them."""

from dataclasses import dataclass

from ..shm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Replicas and front ends of one cluster."""

    data_parallel_size: int = 1
    """Replicas that share the requests."""
    start_timeout_s: float = 900.0
    """From the first process until every replica serves."""
    drain_timeout_s: float = 30.0
    """After SIGTERM or the first Ctrl-C: how long running requests may take to finish."""
    stop_timeout_s: float = 5.0
    """How long a process may take to leave when told to, before it is killed."""

    def __post_init__(self) -> None:
        if self.data_parallel_size < 1:
            raise ConfigError(
                "cluster.data_parallel_size", f"must be at least 1, not {self.data_parallel_size}"
            )
        for name in ("start_timeout_s", "stop_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"cluster.{name}", "must be positive")
        if self.drain_timeout_s < 0:
            raise ConfigError("cluster.drain_timeout_s", "must not be negative")
