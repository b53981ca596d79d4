"""The one listening socket. The supervisor holds it; API servers inherit its descriptor.

Called by: runtime.py, before anything is started, so that a port in use is said at once; clients that connect
while no API server is up wait in the backlog of this socket.
"""

import errno
import socket

from ..shm.errors import ConfigError
from .config import ServerConfig

BACKLOG = 2048


def bind_listener(config: ServerConfig) -> socket.socket:
    """Bind and listen. The caller closes it.

    Raises ConfigError: server.port when it is taken or forbidden, server.host when it is not ours.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError("server.host", f"{config.host!r} cannot be resolved: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        # Without it a restart within a minute would meet its own connections in TIME_WAIT. A port on which
        # another process listens is refused all the same.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Already now: two sockets may be bound to one address with SO_REUSEADDR, but only one may listen.
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except PermissionError:
        listener.close()
        raise ConfigError("server.port", f"port {config.port} may not be opened by this user") from None
    except OSError as error:
        listener.close()
        place = f"{config.host}:{config.port}"
        problem = (
            f"{place} is in use by another process"
            if error.errno == errno.EADDRINUSE
            else f"{place}: {error.strerror}"
        )
        raise ConfigError("server.port", problem) from None
    return listener


def listener_url(listener: socket.socket) -> str:
    """Say the address as a URL that a client of this host can use."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
