"""The section of a cluster: how many replicas and front ends, and how long to wait for them."""

from dataclasses import dataclass

from ..shm.errors import ConfigError
from .routing import RoutingPolicy

MIN_HANG_TIMEOUT_S = 5.0
"""An engine core or the coordinator at rest says every other second that it lives."""
MAX_API_SERVERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Replicas and front ends of one cluster."""

    data_parallel_size: int = 1
    """Replicas that share the requests."""
    num_api_servers: int = 1
    """API server processes behind the one address: they share tokenising and streaming."""
    routing_policy: RoutingPolicy = RoutingPolicy.PREFIX_AWARE
    """How a request finds its replica: prefix_aware, kv_aware, least_loaded, power_of_two or round_robin."""
    sticky_sessions: bool = False
    """Requests with the same X-Session-Id header, or else the same `user`, stay on one replica while it has room."""
    max_num_waiting: int | None = None
    """Requests that may wait in all replicas together; one more is answered 429. None: each replica has its own limit,
    scheduler.max_num_waiting, and no other."""
    start_timeout_s: float = 900.0
    """From the first process until every replica serves."""
    drain_timeout_s: float = 30.0
    """After SIGTERM or the first Ctrl-C: how long running requests may take to finish."""
    stop_timeout_s: float = 5.0
    """How long a process may take to leave when told to, before it is killed."""
    max_restarts: int = 5
    """How often one process may be started again within restart_window_s, before it is given up. 0: never."""
    restart_window_s: float = 600.0
    """Deaths longer ago than this are forgiven."""
    restart_backoff_s: float = 0.5
    """Pause before a process is started again after a second death within restart_window_s; doubled with each further
    one, up to max_restart_backoff_s. After a first death there is none."""
    max_restart_backoff_s: float = 30.0
    """Longest such pause."""
    hang_timeout_s: float = 30.0
    """A replica is started again when its engine core does nothing for so long outside a step, or for so long beyond
    executor.step_timeout_s within one, or when one of its processes is stopped by a signal for so long; an API server
    or the coordinator when it does nothing for so long."""
    min_ready_replicas: int = 1
    """With fewer replicas that serve, /ready says 503."""
    admin_timeout_s: float = 900.0
    """For one replica's part of an administrator's command that names no time of its own."""
    replay_wait_s: float = 120.0
    """How long a request whose replica was lost waits for another one, before it ends with an error."""

    def __post_init__(self) -> None:
        if self.data_parallel_size < 1:
            raise ConfigError(
                "cluster.data_parallel_size", f"must be at least 1, not {self.data_parallel_size}"
            )
        if not 1 <= self.num_api_servers <= MAX_API_SERVERS:
            raise ConfigError(
                "cluster.num_api_servers", f"must be 1 to {MAX_API_SERVERS}, not {self.num_api_servers}"
            )
        if not 0 <= self.min_ready_replicas <= self.data_parallel_size:
            raise ConfigError(
                "cluster.min_ready_replicas",
                f"must be in [0, cluster.data_parallel_size], not {self.min_ready_replicas}",
            )
        if self.max_num_waiting is not None and self.max_num_waiting < 1:
            raise ConfigError("cluster.max_num_waiting", f"must be at least 1, not {self.max_num_waiting}")
        if self.max_restarts < 0:
            raise ConfigError("cluster.max_restarts", f"must not be negative, not {self.max_restarts}")
        for name in (
            "start_timeout_s",
            "stop_timeout_s",
            "restart_window_s",
            "restart_backoff_s",
            "admin_timeout_s",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"cluster.{name}", "must be positive")
        for name in ("drain_timeout_s", "replay_wait_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"cluster.{name}", "must not be negative")
        if self.hang_timeout_s < MIN_HANG_TIMEOUT_S:
            raise ConfigError("cluster.hang_timeout_s", f"must be at least {MIN_HANG_TIMEOUT_S:g}")
        if self.max_restart_backoff_s < self.restart_backoff_s:
            raise ConfigError("cluster.max_restart_backoff_s", "must be at least cluster.restart_backoff_s")
