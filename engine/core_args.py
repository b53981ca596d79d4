"""What an engine-core process is told, and what it says when it is ready. Apart from core_proc.py, so that whoever
starts one need not import an engine.

Called by: the supervisor and `ProcessCoreClient` encode the arguments, core_proc.py decodes them; and the other way
round when it is ready.
"""

import msgspec

from ..workers.messages import ExecutorReport
from .config import EngineConfig


class EngineCoreArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine-core process is told.

    input_address:    where it binds, for front ends to send to
    stats_address:    where it sends `EngineStats`; None: nowhere
    device_indices:   GPUs of its ranks, consecutive; ignored on CPU
    board_fd:         the status board, inherited under this number, of num_board_slots; the engine core's own slot is
                      first_board_slot, and those of its ranks follow it
    num_host_ranks:   workers of all replicas on this host; those of this one are consecutive, in the order of dp_rank
    expected_free_bytes: what was free on each rank's GPU when the replica was started for the first time; empty then
    is_paused:        it begins no step until it is told to
    """

    config: EngineConfig
    dp_rank: int
    epoch: int
    input_address: str
    stats_address: str | None
    device_indices: list[int]
    board_fd: int | None = None
    num_board_slots: int = 0
    first_board_slot: int = 0
    num_host_ranks: int | None = None
    expected_free_bytes: list[int | None] = []
    is_paused: bool = False


class EngineCoreReady(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine-core process says when it serves. report.max_model_len: what the KV cache holds at most."""

    report: ExecutorReport
    pid: int
