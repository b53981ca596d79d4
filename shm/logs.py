"""The format of log lines, the same for every process: time, level, who, what.

Called by: the command line in the top process, and child_context.py in every child, once, first thing.
"""

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s [{role}] %(message)s"
QUIET = ("uvicorn", "httpx", "httpcore", "asyncio", "huggingface_hub", "filelock")
"""Libraries that tell a story of their own; only their warnings are of interest here."""


def configure_logging(role: str, *, level: int = logging.INFO) -> None:
    """Send this process's log lines to standard error, each with `role` ("api0", "dp1 tp3") in front.

    Replaces handlers that were there, so that calling it twice does not double the lines.
    """
    logging.basicConfig(
        level=level,
        format=FORMAT.format(role=role.replace("%", "%%")),
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
