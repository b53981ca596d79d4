"""What the supervisor, the coordinator and the front ends tell each other. msgspec values, no pickle.

The supervisor speaks over each child's lifeline, the coordinator over ZMQ PUB. Who is ready, and where, comes
from the supervisor; how busy it is, from the coordinator. What an operator wishes goes from a front end to the
supervisor, and the result comes back. Instants are the host's `time.monotonic()`.
"""

from enum import StrEnum

import msgspec

from ..engine.messages import EngineStats
from ..workers.sleep import SleepLevel
from .supervision_events import ChildKind, ChildState, ClusterState, ReplicaMode


class ReplicaState(StrEnum):
    """One replica as the supervisor sees it."""

    STARTING = "starting"
    READY = "ready"
    WITHHELD = "withheld"
    """It lives, and an operator wishes that it takes no requests."""
    LOST = "lost"


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: where its engine core listens, and whether it serves.

    epoch:         one more each time the replica is started again
    max_model_len: longest prompt plus output that its KV cache holds, in tokens; None until it is ready
    block_size:    tokens of one of its KV blocks; None until it is ready
    weights_version: what clients are told of the weights that it serves
    """

    dp_rank: int
    epoch: int
    state: ReplicaState
    input_address: str
    max_model_len: int | None = None
    block_size: int | None = None
    weights_version: str = ""


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One child of the supervisor. A replica's workers end with its engine core, and have no life of their own.

    pid:          None when it has no process
    num_restarts: since the cluster was started, by death or by wish; num_failures: deaths; num_hangs: those of them
                  that the supervisor brought about because the process stood still
    last_error:   why it died last
    """

    role: str
    kind: ChildKind
    state: ChildState
    mode: ReplicaMode
    pid: int | None
    epoch: int
    num_restarts: int
    num_failures: int
    num_hangs: int
    last_error: str | None


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as planned. pid: None until its replica was ready once."""

    dp_rank: int
    tp_rank: int
    host: str
    device: str
    pid: int | None


class StuckRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank or engine core that stands still: role, phase of the status board, and one sentence."""

    role: str
    phase: str
    problem: str


class FleetUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="fleet"):
    """All that front ends know of the cluster, from the supervisor to each of them, whenever something changes.

    sequence:  answered by a `FleetApplied`, once requests have moved from replicas that must not keep them
    is_paused: no replica begins a step
    state:     of the cluster: once it stops, what a replica aborts is not continued
    operation: the operator's wish that is being carried out
    """

    replicas: list[ReplicaInfo]
    sequence: int = 0
    processes: list[ProcessInfo] = []
    ranks: list[RankInfo] = []
    stuck: list[StuckRank] = []
    is_paused: bool = False
    state: ClusterState = ClusterState.SERVING
    operation: str | None = None


class FleetApplied(msgspec.Struct, frozen=True, kw_only=True, tag="applied"):
    """A front end has done what the update of that number asks for."""

    sequence: int


class AdminKind(StrEnum):
    """What an operator may wish."""

    DRAIN = "drain"
    RESUME = "resume"
    RESTART = "restart"
    RELOAD = "reload"
    PAUSE = "pause"
    UNPAUSE = "unpause"
    SLEEP = "sleep"
    WAKE = "wake"
    RESET_PREFIX_CACHE = "reset_prefix_cache"
    SCALE = "scale"


class AdminCommand(msgspec.Struct, frozen=True, kw_only=True, tag="command"):
    """One wish, from a front end to the supervisor. Answered by the `AdminResult` of the same command_id.

    dp_rank:       the replica; None: all
    path, version: of a RELOAD; level: of a SLEEP; data_parallel_size: of a SCALE
    timeout_s:     for all of it; None: a default for each replica
    """

    command_id: int
    kind: AdminKind
    dp_rank: int | None = None
    path: str | None = None
    version: str | None = None
    level: SleepLevel = SleepLevel.HOST
    data_parallel_size: int | None = None
    timeout_s: float | None = None


class ReplicaResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one replica. problem: None when all went well."""

    dp_rank: int
    problem: str | None


class AdminStatus(StrEnum):
    """What became of a wish."""

    DONE = "done"
    FAILED = "failed"
    """On one replica at least; see each one's result."""
    INVALID = "invalid"
    """It cannot be meant; nothing was done."""
    UNKNOWN = "unknown"
    """There is no such replica; nothing was done."""
    CONFLICT = "conflict"
    """Not now: another wish is under way, or the state of the cluster forbids it; nothing was done."""


class AdminResult(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """The end of a wish. problem: one sentence, unless it was DONE; field: of the wish, that was refused for it."""

    command_id: int
    status: AdminStatus
    problem: str | None = None
    field: str | None = None
    replicas: list[ReplicaResult] = []


class BlamedRequests(msgspec.Struct, frozen=True, kw_only=True, tag="blamed"):
    """Requests that kill replicas, by their fingerprints: from the front end that found out, and to all others."""

    fingerprints: list[bytes]


ToFrontEnd = FleetUpdate | AdminResult | BlamedRequests
"""All that the supervisor says to a front end."""
FromFrontEnd = FleetApplied | AdminCommand | BlamedRequests
"""All that a front end says to the supervisor."""


class LoadSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The load of all replicas that have reported, from the coordinator to each front end.

    A replica that is absent is unknown, not idle.
    """

    sequence: int
    published_at: float
    stats: list[EngineStats]


class BoardPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a child says what it does: the status board, inherited as `fd`, of `num_slots`; and its own slot."""

    fd: int
    num_slots: int
    slot: int


class FrontEndsPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The table of a `FrontEndBoard`, inherited as `fd`, with one row for each of num_front_ends."""

    fd: int
    num_front_ends: int


class FrontEndConnection(msgspec.Struct, frozen=True, kw_only=True):
    """How a front end joins the cluster: its own index, where its outputs arrive, where snapshots are published.

    incarnation: one more each time this front end is started again
    board:       where it says what it does; None: nobody watches it
    front_ends:  what front ends tell each other; None: there is one
    """

    client_index: int
    incarnation: int
    output_address: str
    snapshot_address: str
    board: BoardPlace | None = None
    front_ends: FrontEndsPlace | None = None
