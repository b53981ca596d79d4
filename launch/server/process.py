"""The API-server process: the application on the inherited socket, in front of the cluster's replicas.

Started by the supervisor. There may be several, behind one listening socket; each has its own connections, and its own
requests in the replicas. Main thread: the event loop, and everything but the lifeline thread, which hands the
supervisor's messages over to it. A stop closes the gate, lets running requests finish within the drain budget and then
leaves; meanwhile new connections are the other servers', unless all of them stop.

When the supervisor dies the process ends at once (see shm/child.py); when a replica dies its requests continue
elsewhere (see cluster/replay.py); when this process dies, its connections break and its requests are aborted. It ends
itself when a bug has ended the task that takes outputs: nobody would ever be answered again.
"""

import asyncio
import logging
import socket
import time

import msgspec
import uvloop

from ...cluster.dp_client import DpClient
from ...cluster.front_end_board import NUM_COLUMNS, FrontEndBoard
from ...cluster.messages import BoardPlace, FleetUpdate, FrontEndConnection, ToFrontEnd
from ...cluster.supervision_events import ClusterState
from ...engine.async_llm import AsyncLLM
from ...engine.input_processor import InputProcessor
from ...shm.child_context import ChildContext
from ...shm.exit_codes import ExitCode
from ...shm.number_table import NumberTable
from ...shm.status_board import Phase, StatusBoard
from .. import metric_series
from ..metrics import Place, ServerMetrics
from ..preflight import read_admin_key, read_api_key
from .app import create_app
from .args import ApiServerArgs
from .cluster_link import ClusterLink
from .http_server import make_server
from .service import Gate, Service

log = logging.getLogger(__name__)

BEAT_S = 0.5
"""How often the event loop says that it goes on, and shares what it has counted."""


def main(context: ChildContext) -> int:
    """Serve until a stop is asked. The result is the exit code."""
    args = msgspec.msgpack.decode(context.args, type=ApiServerArgs)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(context, args))


async def _serve(context: ChildContext, args: ApiServerArgs) -> int:
    loop = asyncio.get_running_loop()
    stop_asked = asyncio.Event()

    def ask_stop() -> None:
        loop.call_soon_threadsafe(stop_asked.set)

    context.on_stop(ask_stop)
    context.progress("tokenizer")
    input_processor = InputProcessor.from_model(args.model)
    board = _front_end_board(args.connection)
    client = DpClient(
        args.connection,
        replay_wait_s=args.replay_wait_s,
        routing=args.routing,
        board=board,
        on_blamed=lambda fingerprints: link.tell_blamed(fingerprints),
    )
    engine = AsyncLLM(client, input_processor, client_index=args.connection.client_index)
    await engine.start()
    decoder: msgspec.msgpack.Decoder[ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd)

    def apply(update: FleetUpdate) -> None:
        client.apply(update)
        if client.max_model_len is not None:
            input_processor.max_model_len = client.max_model_len
        # Hashes serve the balancer's index and the engine core's prefix cache; without a cache nobody needs them.
        input_processor.block_size = client.block_size if args.hashes_prompts else None
        if stop_asked.is_set() and update.state is not ClusterState.SERVING:
            # There is no other server that could answer: it is on us to say no.
            server.take_connections()

    link = ClusterLink(context.note, apply, client.learn_blamed)

    def take(data: bytes) -> None:
        loop.call_soon_threadsafe(link.take, decoder.decode(data))

    context.on_message(take)
    service = make_service(args, input_processor, engine, client, link)
    server = make_server(
        create_app(service), args.server.access_log, on_started=lambda: context.ready(b""), board=board
    )
    beating = asyncio.create_task(_beat(args.connection.board, service), name="beat")
    serving = asyncio.create_task(server.serve([socket.socket(fileno=args.listen_fd)]), name="http server")
    stopping = asyncio.create_task(stop_asked.wait(), name="stop")
    failing = asyncio.create_task(engine.wait_failed(), name="engine failure")
    try:
        await asyncio.wait({serving, stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        if stop_asked.is_set():
            if link.fleet is None or link.fleet.state is ClusterState.SERVING:
                server.hold_connections()
            log.info("draining requests=%d budget_s=%.0f", service.gate.num_inside, args.drain_timeout_s)
            if not await service.gate.drain(args.drain_timeout_s):
                log.warning("the drain budget is spent requests=%d", service.gate.num_inside)
        server.should_exit = True
        # Raises what ended the server, when it was not asked to end.
        await serving
        if failing.done() and not stop_asked.is_set():
            raise failing.result()
    finally:
        stopping.cancel()
        failing.cancel()
        beating.cancel()
        service.metrics.share()
        await engine.close()
    return ExitCode.OK if stop_asked.is_set() else ExitCode.FAILED


def _front_end_board(connection: FrontEndConnection) -> FrontEndBoard | None:
    """Map what the front ends tell each other, for as long as the process lives."""
    place = connection.front_ends
    if place is None:
        return None
    table = NumberTable.attach(place.fd, place.num_front_ends, NUM_COLUMNS)
    return FrontEndBoard(table, connection.client_index)


async def _beat(place: BoardPlace | None, service: Service) -> None:
    """Say on the status board that the event loop goes on: who does not for long hangs, and is replaced."""
    slot = None if place is None else StatusBoard.attach(place.fd, place.num_slots).writer(place.slot)
    while True:
        if slot is not None:
            slot.set(Phase.SERVING)
        service.metrics.share()
        await asyncio.sleep(BEAT_S)


def make_service(
    args: ApiServerArgs,
    input_processor: InputProcessor,
    engine: AsyncLLM,
    client: DpClient,
    link: ClusterLink,
) -> Service:
    """Join the real parts for the routes."""
    model_name = args.server.served_model_name
    assert model_name is not None, "the command line has filled it in"
    return Service(
        engine=engine,
        codec=input_processor.tokenizer,
        renderer=input_processor.chat_template,
        cluster=client,
        metrics=ServerMetrics(
            model_name,
            lambda: client.stats,
            lambda: client.num_ready,
            fleet=lambda: link.fleet,
            replay=lambda: client.replay_stats,
            num_routed=lambda: client.num_routed,
            snapshot_age_s=lambda: client.snapshot_age_s,
            place=Place(
                NumberTable.attach(args.metrics_fd, args.routing.num_clients, metric_series.NUM_COLUMNS),
                args.connection.client_index,
            ),
        ),
        gate=Gate(),
        model_name=model_name,
        model_root=args.model.path,
        # The API's own notion of an instant: seconds since 1970.
        created_at=int(time.time()),
        get_max_model_len=lambda: input_processor.max_model_len,
        vocab_size=input_processor.vocab_size,
        max_prompts=args.server.max_prompts,
        max_body_bytes=args.server.max_body_bytes,
        api_key=read_api_key(args.server),
        link=link,
        admin_key=read_admin_key(args.server),
        min_ready_replicas=args.min_ready_replicas,
    )
