"""One replica on echo workers: an engine core and its ranks, real processes without torch, held where a test wants.

`main` is the target of the engine core's process; `EchoReplica` starts and watches it, as the supervisor does.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from phalanx.engine.config import EngineConfig
from phalanx.engine.core_args import EngineCoreArgs
from phalanx.engine.core_proc import run_engine_core
from phalanx.shm.child_context import ChildContext
from phalanx.shm.errors import ProcessError
from phalanx.shm.process import ChildSpec, Spawner, wait_all_ready
from phalanx.shm.sockets import connect_push
from phalanx.workers.config import ExecutorConfig, ModelConfig, ParallelConfig
from phalanx.workers.executor import make_worker_configs
from phalanx.workers.multiproc_executor import MultiprocExecutor
from support.children import wait_until
from support.echo_worker import ECHO_WORKER, Fault, write_echo_model
from support.engine import make_request

_HELD_MODULE = "held_at_import"
_HELD_SOURCE = """
import sys, time
from pathlib import Path
if "dp0 tp1" in sys.argv:
    (Path(__file__).parent / "held-1").touch()
    while True:
        time.sleep(60)
from support.echo_worker import EchoWorker
"""


def main(context: ChildContext) -> int:
    def make(
        args: EngineCoreArgs,
        on_phase: Callable[[int, str], None],
        on_failure: Callable[[ProcessError], None],
    ) -> MultiprocExecutor:
        config = args.config
        configs = make_worker_configs(
            model=config.model,
            cache=config.cache,
            parallel=config.parallel,
            max_num_seqs=8,
            max_num_batched_tokens=64,
        )
        held = (Path(config.model.path) / f"{_HELD_MODULE}.py").exists()
        return MultiprocExecutor(
            configs,
            config=config.executor,
            worker_class=f"{_HELD_MODULE}:EchoWorker" if held else ECHO_WORKER,
            on_phase=on_phase,
            on_failure=on_failure,
        )

    return run_engine_core(context, make)


def hold_at_import(folder: Path) -> None:
    """Have rank 1 stand still in the import of its worker class. `folder` must be on sys.path."""
    (folder / f"{_HELD_MODULE}.py").write_text(_HELD_SOURCE)


class EchoReplica:
    """An engine core of two echo ranks. `folder` is its model's; it must be short, for a socket lies there."""

    def __init__(self, folder: Path, faults: Sequence[Fault], executor: ExecutorConfig) -> None:
        self._folder = folder
        self._address = f"ipc://{folder}/core"
        self._spawner = Spawner("test")
        self._spawner.start()
        config = EngineConfig(
            model=ModelConfig(path=write_echo_model(folder, faults)),
            parallel=ParallelConfig(tensor_parallel_size=2),
            executor=executor,
        )
        args = EngineCoreArgs(
            config=config,
            dp_rank=0,
            epoch=0,
            input_address=self._address,
            stats_address=None,
            device_indices=[],
        )
        self.core = self._spawner.spawn(
            ChildSpec(
                role="dp0", target="support.echo_replica:main", args=msgspec.msgpack.encode(args), rank=0
            )
        )

    def wait_ready(self) -> None:
        wait_all_ready([self.core], time.monotonic() + 30.0)

    def wait_held(self) -> None:
        """Wait until rank 1 stands where it shall be held."""
        wait_until((self._folder / "held-1").exists, timeout_s=30.0, what="the hold of rank 1")

    def send_request(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = connect_push(context, self._address)
        socket.send(msgspec.msgpack.encode(make_request(max_tokens=40, ignore_eos=True)))
        socket.close(linger=5000)
        context.term()

    def worker_pids(self) -> dict[str, int]:
        """Process ids of the ranks, by their role."""
        found: dict[str, int] = {}
        for task in Path(f"/proc/{self.core.pid}/task").iterdir():
            for pid in (task / "children").read_text().split():
                try:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                except (FileNotFoundError, ProcessLookupError):  # it has left since it was listed
                    continue
                role = next((word for word in command if word.startswith(b"dp0 tp")), None)
                title = b"".join(command).removeprefix(b"phalanx ")
                found[(role or title).decode()] = int(pid)
        return found

    def wait_end(self) -> tuple[int, str]:
        """Wait for the engine core's own end. Returns its exit code, and the reason that it told."""
        assert self.core.wait(30.0) is not None, "the engine core does not end"
        self.core.receive()
        exitcode = self.core.exitcode
        assert exitcode is not None
        return exitcode, self.core.failure.error if self.core.failure else ""

    def close(self) -> None:
        """End what a test has left of it."""
        self.core.stop(reason="end of test", timeout_s=0.0)
        self._spawner.close()
