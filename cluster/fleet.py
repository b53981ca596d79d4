"""What each child of the supervisor is started with, and what others are told of it.

Called by: the supervisor, in its main thread. Holds what is known of the replicas beside their life: the plan, the
weights of each, what each said when it was ready. Starts nothing.
"""

import socket
from collections.abc import Callable
from dataclasses import replace

import msgspec

from ..engine.config import EngineConfig
from ..engine.core_args import EngineCoreArgs, EngineCoreReady
from ..shm.number_table import NumberTable
from ..shm.process import ChildSpec
from ..shm.runtime_dir import RuntimeDir
from ..shm.status_board import RankStatus, StatusBoard
from ..workers.messages import ExecutorReport
from .admin import MAX_REPLICAS
from .coordinator import CoordinatorArgs
from .health import Look
from .messages import BoardPlace, FrontEndConnection, FrontEndsPlace, RankInfo, ReplicaInfo, ReplicaState
from .operations import Weights
from .placement import Plan
from .supervision_events import ChildKind

COORDINATOR = "coordinator"


def core_role(dp_rank: int) -> str:
    """The role of a replica's engine core."""
    return f"dp{dp_rank}"


def api_server_role(client_index: int) -> str:
    """The role of an API server."""
    return f"api{client_index}"


def kind_of(role: str) -> ChildKind:
    """What a child of that role is."""
    if role == COORDINATOR:
        return ChildKind.COORDINATOR
    return ChildKind.API_SERVER if role.startswith("api") else ChildKind.ENGINE_CORE


def rank_of(role: str) -> int | None:
    """The dp_rank of an engine core; None for other roles."""
    return int(role.removeprefix("dp")) if kind_of(role) is ChildKind.ENGINE_CORE else None


def client_index_of(role: str) -> int:
    """Which front end an API server is."""
    return int(role.removeprefix("api"))


def num_board_slots(tensor_parallel_size: int, num_api_servers: int) -> int:
    """Slots of the status board.

    An engine core and its workers, for as many replicas as there may ever be; the coordinator; the API servers.
    """
    return MAX_REPLICAS * (1 + tensor_parallel_size) + 1 + num_api_servers


class Fleet:
    """The children's arguments and addresses.

    board, front_ends, runtime_dir: of the cluster; closed by their owner
    """

    def __init__(
        self,
        *,
        plan: Plan,
        engine: EngineConfig,
        make_api_server: Callable[[FrontEndConnection], ChildSpec],
        weights: Weights,
        board: StatusBoard,
        front_ends: NumberTable,
        runtime_dir: RuntimeDir,
    ) -> None:
        self.plan = plan
        """Also of replicas that are being added."""
        self.weights = weights
        """Of replicas that have none of their own: what the newest were told to serve."""
        self.reports: dict[int, ExecutorReport] = {}
        """What each replica said when it was ready last, by dp_rank."""
        self._engine = engine
        self._make_api_server = make_api_server
        self._board = board
        self._front_ends = front_ends
        self._runtime_dir = runtime_dir
        self._weights: dict[int, Weights] = {}
        self._free_bytes: dict[int, list[int | None]] = {}

    def weights_of(self, dp_rank: int) -> Weights:
        """Which weights a replica serves, or will serve when it is started next."""
        return self._weights.get(dp_rank, self.weights)

    def set_weights(self, dp_rank: int, weights: Weights) -> None:
        """Have a replica serve these weights from its next start on."""
        self._weights[dp_rank] = weights

    def is_ready(self, dp_rank: int, payload: bytes) -> None:
        """Note what an engine core says when it serves."""
        report = msgspec.msgpack.decode(payload, type=EngineCoreReady).report
        self.reports[dp_rank] = report
        # Of its first life: later ones begin while there is something left of the one before.
        self._free_bytes.setdefault(dp_rank, [rank.free_bytes for rank in report.ranks])

    def forget(self, dp_rank: int) -> None:
        """A replica was removed."""
        self.reports.pop(dp_rank, None)
        self._weights.pop(dp_rank, None)

    def spec(self, role: str, epoch: int, *, is_paused: bool) -> ChildSpec:
        """Return what to start for a role. is_paused: an engine core begins no step until it is told to."""
        match kind_of(role):
            case ChildKind.COORDINATOR:
                args = CoordinatorArgs(
                    stats_address=self._address("stats"),
                    snapshot_address=self._address("loads"),
                    board=self._board_place(role),
                )
                return ChildSpec(
                    role=role,
                    target="phalanx.cluster.coordinator:main",
                    args=msgspec.msgpack.encode(args),
                    pass_fds=(self._board.fd,),
                )
            case ChildKind.ENGINE_CORE:
                return self._engine_core_spec(role, epoch, is_paused=is_paused)
            case ChildKind.API_SERVER:
                connection = FrontEndConnection(
                    client_index=client_index_of(role),
                    incarnation=epoch,
                    output_address=self._address(f"{role}.{epoch}"),
                    snapshot_address=self._address("loads"),
                    board=self._board_place(role),
                    front_ends=FrontEndsPlace(
                        fd=self._front_ends.fd, num_front_ends=self._front_ends.num_rows
                    ),
                )
                return self._make_api_server(connection)

    def _engine_core_spec(self, role: str, epoch: int, *, is_paused: bool) -> ChildSpec:
        dp_rank = rank_of(role)
        assert dp_rank is not None
        ranks = self.plan.replica(dp_rank)
        args = EngineCoreArgs(
            config=replace(
                self._engine,
                model=replace(self._engine.model, path=self.weights_of(dp_rank).path),
                parallel=replace(self._engine.parallel, num_threads=ranks[0].num_threads),
            ),
            dp_rank=dp_rank,
            epoch=epoch,
            input_address=self._address(f"{role}.{epoch}"),
            stats_address=self._address("stats"),
            device_indices=[rank.device_index for rank in ranks],
            board_fd=self._board.fd,
            num_board_slots=self._board.num_slots,
            first_board_slot=self._slot(role),
            num_host_ranks=len(self.plan.ranks),
            expected_free_bytes=self._free_bytes.get(dp_rank, []),
            is_paused=is_paused,
        )
        return ChildSpec(
            role=role,
            target="phalanx.engine.core_proc:main",
            args=msgspec.msgpack.encode(args),
            rank=dp_rank,
            pass_fds=(self._board.fd,),
        )

    def looks(self, role: str, epoch: int, pid: int, is_stopped: Callable[[int], bool]) -> dict[str, Look]:
        """Look at a child that serves, and at its workers when it is an engine core; by role."""

        def look(status: RankStatus, pid: int, *, is_worker: bool) -> Look:
            return Look(epoch=epoch, status=status, is_worker=is_worker, is_stopped=is_stopped(pid))

        slot = self._slot(role)
        found = {role: look(self._board.read(slot), pid, is_worker=False)}
        dp_rank = rank_of(role)
        for rank in self.reports[dp_rank].ranks if dp_rank is not None else ():
            status = self._board.read(slot + 1 + rank.tp_rank)
            found[f"{role} tp{rank.tp_rank}"] = look(status, rank.pid, is_worker=True)
        return found

    def replica_info(self, dp_rank: int, epoch: int, state: ReplicaState) -> ReplicaInfo:
        """What front ends are told of a replica."""
        report = self.reports.get(dp_rank)
        return ReplicaInfo(
            dp_rank=dp_rank,
            epoch=epoch,
            state=state,
            input_address=self._address(f"{core_role(dp_rank)}.{epoch}"),
            max_model_len=report.max_model_len if report is not None else None,
            block_size=report.block_size if report is not None else None,
            weights_version=self.weights_of(dp_rank).version,
        )

    def rank_infos(self) -> list[RankInfo]:
        """All workers as planned, with the pids that they had when they were last ready."""
        infos = []
        for rank in self.plan.ranks:
            report = self.reports.get(rank.dp_rank)
            infos.append(
                RankInfo(
                    dp_rank=rank.dp_rank,
                    tp_rank=rank.tp_rank,
                    host=socket.gethostname() if rank.host == "localhost" else rank.host,
                    device=rank.device,
                    pid=report.ranks[rank.tp_rank].pid if report is not None else None,
                )
            )
        return infos

    def _slot(self, role: str) -> int:
        """A child's place on the status board; the workers of an engine core follow it."""
        slots_per_replica = 1 + self.plan.tensor_parallel_size
        dp_rank = rank_of(role)
        if dp_rank is not None:
            return dp_rank * slots_per_replica
        first_other = MAX_REPLICAS * slots_per_replica
        return first_other if role == COORDINATOR else first_other + 1 + client_index_of(role)

    def _board_place(self, role: str) -> BoardPlace:
        return BoardPlace(fd=self._board.fd, num_slots=self._board.num_slots, slot=self._slot(role))

    def _address(self, name: str) -> str:
        return self._runtime_dir.address(name)
