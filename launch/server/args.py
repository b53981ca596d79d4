"""What an API-server process is told. Apart from process.py, so that the supervisor need not import a server.

Called by: runtime.py encodes it, process.py decodes it.
"""

import msgspec

from ...cluster.messages import FrontEndConnection
from ...cluster.routing import RoutingOptions
from ...workers.config import ModelConfig
from ..config import ServerConfig


class ApiServerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of an API-server process.

    connection:      how it joins the cluster
    listen_fd:       the inherited listening socket
    metrics_fd:      the inherited table in which the API servers count, with a row for each
    drain_timeout_s: how long running requests may take to finish once a stop is asked
    replay_wait_s:   how long a request whose replica was lost waits for another one
    min_ready_replicas: with fewer that serve, /ready says 503
    routing:         how a request finds its replica
    hashes_prompts:  the engine cores have a prefix cache
    """

    connection: FrontEndConnection
    listen_fd: int
    metrics_fd: int
    server: ServerConfig
    model: ModelConfig
    drain_timeout_s: float
    replay_wait_s: float
    min_ready_replicas: int
    routing: RoutingOptions = RoutingOptions()
    hashes_prompts: bool = True
