"""Introduces the objects to each other: plan, listening socket, supervisor, API servers. Nothing else does.

Called by: cli.py, in the main thread of the process that becomes the supervisor.
"""

import logging
import os
import sys

import msgspec

from ..cluster import front_end_board
from ..cluster.fleet import api_server_role, num_board_slots
from ..cluster.messages import FrontEndConnection
from ..cluster.operations import Weights
from ..cluster.placement import Plan, make_plan
from ..cluster.routing import RoutingOptions
from ..cluster.supervisor import Supervisor
from ..shm.exit_codes import ExitCode
from ..shm.number_table import NUMBER_BYTES, NumberTable
from ..shm.ordering import CACHE_LINE_BYTES
from ..shm.process import ChildSpec
from ..shm.segment import PlannedSegment, SegmentPlan, available_memory_bytes
from ..workers.config import DeviceType
from ..workers.gpu_count import count_gpus
from ..workers.worker_group import planned_segments
from .config import LaunchConfig
from .console import ConsoleObserver
from .listener import bind_listener, listener_url
from .metric_series import NUM_COLUMNS
from .preflight import check_other_weights
from .server.args import ApiServerArgs

log = logging.getLogger(__name__)


def plan_of(config: LaunchConfig, num_replicas: int | None = None) -> Plan:
    """Give every rank its device. num_replicas: None: as configured.

    Raises ConfigError when there are more ranks than devices.
    """
    return make_plan(
        data_parallel_size=num_replicas or config.cluster.data_parallel_size,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        device=config.parallel.device,
        num_devices=count_gpus(),
        num_cores=len(os.sched_getaffinity(0)),
        num_threads=config.parallel.num_threads,
        share_device=config.parallel.share_device,
    )


def plan_shared_memory(config: LaunchConfig, plan: Plan) -> SegmentPlan:
    """Sum up the segments of all replicas. Raises ConfigError when they do not fit this host's memory."""
    board = PlannedSegment(
        name="status board",
        num_bytes=num_board_slots(plan.tensor_parallel_size, config.cluster.num_api_servers)
        * CACHE_LINE_BYTES,
    )
    segments = [
        segment
        for dp_rank in range(plan.data_parallel_size)
        for segment in planned_segments(config.executor, config.parallel, f"dp{dp_rank}")
    ]
    tables = [
        PlannedSegment(name=name, num_bytes=config.cluster.num_api_servers * num_columns * NUMBER_BYTES)
        for name, num_columns in (("front ends", front_end_board.NUM_COLUMNS), ("metrics", NUM_COLUMNS))
    ]
    memory = SegmentPlan(segments=(*segments, board, *tables))
    memory.check_fits(available_memory_bytes())
    return memory


def run(config: LaunchConfig, plan: Plan) -> ExitCode:
    """Start the cluster, serve, and end with it. `config` is resolved: a folder, a device, a name."""
    memory = plan_shared_memory(config, plan)
    num_cores = len(os.sched_getaffinity(0))
    if config.parallel.device is DeviceType.CPU and len(plan.ranks) > num_cores:
        log.warning("more ranks than cores, each will be slow ranks=%d cores=%d", len(plan.ranks), num_cores)
    assert config.server.served_model_name is not None
    listener = bind_listener(config.server)
    table = NumberTable.create("metrics", config.cluster.num_api_servers, NUM_COLUMNS)
    observer = ConsoleObserver(
        url=listener_url(listener), model_name=config.server.served_model_name, out=sys.stdout, err=sys.stderr
    )

    def make_api_server(connection: FrontEndConnection) -> ChildSpec:
        args = ApiServerArgs(
            connection=connection,
            listen_fd=listener.fileno(),
            metrics_fd=table.fd,
            server=config.server,
            model=config.model,
            drain_timeout_s=config.cluster.drain_timeout_s,
            replay_wait_s=config.cluster.replay_wait_s,
            min_ready_replicas=config.cluster.min_ready_replicas,
            routing=RoutingOptions(
                policy=config.cluster.routing_policy,
                num_clients=config.cluster.num_api_servers,
                sticky_sessions=config.cluster.sticky_sessions,
                max_num_waiting=config.cluster.max_num_waiting,
                max_num_waiting_per_replica=config.scheduler.max_num_waiting,
                max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            ),
            hashes_prompts=config.cache.enable_prefix_caching,
        )
        assert connection.board is not None
        assert connection.front_ends is not None
        return ChildSpec(
            role=api_server_role(connection.client_index),
            target="phalanx.launch.server.process:main",
            args=msgspec.msgpack.encode(args),
            rank=connection.client_index,
            pass_fds=(listener.fileno(), connection.board.fd, connection.front_ends.fd, table.fd),
        )

    def plan_again(num_replicas: int) -> Plan:
        config.check_replicas(num_replicas)
        new_plan = plan_of(config, num_replicas)
        plan_shared_memory(config, new_plan)
        return new_plan

    try:
        observer.planned(plan, memory)
        return Supervisor(
            plan=plan,
            engine=config.engine,
            cluster=config.cluster,
            make_api_server=make_api_server,
            make_plan=plan_again,
            check_weights=lambda path: check_other_weights(config, path),
            weights=Weights(path=config.model.path, version=config.server.served_model_name),
            observer=observer,
        ).run()
    finally:
        observer.close()
        listener.close()
        table.close()
