"""What the supervisor, the coordinator and the front ends tell each other. msgspec values, no pickle.

The supervisor speaks over each child's lifeline, the coordinator over ZMQ PUB. Who is ready, and where, comes
from the supervisor; how busy it is, from the coordinator. Instants are the host's `time.monotonic()`.
"""

from enum import StrEnum

import msgspec

from ..engine.messages import EngineStats


class ReplicaState(StrEnum):
    """One replica as the supervisor sees it."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: where its engine core listens, and whether it serves.

    epoch:         one more each time the replica is started again
    max_model_len: longest prompt plus output that its KV cache holds, in tokens; None until it is ready
    block_size:    tokens of one of its KV blocks; None until it is ready
    """

    dp_rank: int
    epoch: int
    state: ReplicaState
    input_address: str
    max_model_len: int | None = None
    block_size: int | None = None


class FleetUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """All replicas, from the supervisor to each front end, whenever one changes."""

    replicas: list[ReplicaInfo]


class LoadSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The load of all replicas that have reported, from the coordinator to each front end.

    A replica that is absent is unknown, not idle.
    """

    sequence: int
    published_at: float
    stats: list[EngineStats]


class FrontEndConnection(msgspec.Struct, frozen=True, kw_only=True):
    """How a front end joins the cluster: its own index, where its outputs arrive, where snapshots are published.

    incarnation: one more each time this front end is started again
    """

    client_index: int
    incarnation: int
    output_address: str
    snapshot_address: str
