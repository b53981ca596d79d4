"""A program that starts echo workers, tells their pids and waits to be killed: `python -m support.executor_parent`."""

import signal
import sys
from pathlib import Path

from phalanx.workers.config import ExecutorConfig
from phalanx.workers.multiproc_executor import MultiprocExecutor
from support.echo_worker import ECHO_WORKER, Fault, echo_configs, echo_step


def main(folder: Path) -> None:
    """Two ranks, in the middle of a step that never ends."""
    faults = [Fault(action="wait_for_peers", rank=rank, step=1) for rank in range(2)]
    executor = MultiprocExecutor(
        echo_configs(folder, 2, faults), config=ExecutorConfig(), worker_class=ECHO_WORKER
    )
    executor.start()
    executor.submit_model(echo_step(1))
    print(*executor.pids, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
