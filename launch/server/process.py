"""The API-server process: the application on the inherited socket, in front of the cluster's replicas.

Started by the supervisor. Main thread: the event loop, and everything but the lifeline thread, which hands the
supervisor's messages over to it. A stop closes the gate, lets running requests finish within the drain budget
and then leaves. When the supervisor dies the process ends at once (see shm/child.py); when a replica dies its
requests end with an error and the others go on.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp

from ...cluster.dp_client import DpClient
from ...cluster.messages import FleetUpdate, ToFrontEnd
from ...engine.async_llm import AsyncLLM
from ...engine.input_processor import InputProcessor
from ...shm.child_context import ChildContext
from ...shm.exit_codes import ExitCode
from ..metrics import ServerMetrics
from ..preflight import read_admin_key, read_api_key
from ..routing_metrics import RoutingCollector
from .app import create_app
from .args import ApiServerArgs
from .cluster_link import ClusterLink
from .service import Gate, Service

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""How long an idle connection stays open: longer than the pools of usual proxies keep theirs."""
LAST_WRITES_S = 2
"""For answers that are complete to leave the process, once it stops."""


def main(context: ChildContext) -> int:
    """Serve until a stop is asked. The result is the exit code."""
    args = msgspec.msgpack.decode(context.args, type=ApiServerArgs)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(context, args))


class InheritedServer(uvicorn.Server):
    """uvicorn without its signal handlers: signals are the supervisor's business. Tells when it accepts."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave all signals as they are."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, then say so."""
        await super().startup(sockets)
        self._on_started()


async def _serve(context: ChildContext, args: ApiServerArgs) -> int:
    loop = asyncio.get_running_loop()
    stop_asked = asyncio.Event()

    def ask_stop() -> None:
        loop.call_soon_threadsafe(stop_asked.set)

    context.on_stop(ask_stop)
    context.progress("tokenizer")
    input_processor = InputProcessor.from_model(args.model)
    client = DpClient(args.connection, replay_wait_s=args.replay_wait_s, routing=args.routing)
    engine = AsyncLLM(client, input_processor, client_index=args.connection.client_index)
    await engine.start()
    decoder: msgspec.msgpack.Decoder[ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd)

    def apply(update: FleetUpdate) -> None:
        client.apply(update)
        if client.max_model_len is not None:
            input_processor.max_model_len = client.max_model_len
        # Hashes serve the balancer's index and the engine core's prefix cache; without a cache nobody needs them.
        input_processor.block_size = client.block_size if args.hashes_prompts else None

    link = ClusterLink(context.note, apply)

    def take(data: bytes) -> None:
        loop.call_soon_threadsafe(link.take, decoder.decode(data))

    context.on_message(take)
    service = make_service(args, input_processor, engine, client, link)
    server = make_server(create_app(service), args.server.access_log, on_started=lambda: context.ready(b""))
    serving = asyncio.create_task(server.serve([socket.socket(fileno=args.listen_fd)]), name="http server")
    stopping = asyncio.create_task(stop_asked.wait(), name="stop")
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stop_asked.is_set():
            log.info("draining requests=%d budget_s=%.0f", service.gate.num_inside, args.drain_timeout_s)
            if not await service.gate.drain(args.drain_timeout_s):
                log.warning("the drain budget is spent requests=%d", service.gate.num_inside)
        server.should_exit = True
        # Raises what ended the server, when it was not asked to end.
        await serving
    finally:
        stopping.cancel()
        await engine.close()
    return ExitCode.OK if stop_asked.is_set() else ExitCode.FAILED


def make_server(app: ASGIApp, access_log: bool, on_started: Callable[[], None]) -> InheritedServer:
    """Make the HTTP server. It serves when `serve([listening socket])` is awaited, until `should_exit` is set."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=access_log,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WRITES_S,
    )
    return InheritedServer(config, on_started)


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
            routing=RoutingCollector(model_name, lambda: client.num_routed, lambda: client.snapshot_age_s),
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
