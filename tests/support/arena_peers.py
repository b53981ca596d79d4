"""Ranks of an arena that tests run in child processes."""

import os
import signal

import msgspec

from phalanx.shm.child_context import ChildContext
from phalanx.shm.collective_arena import Collective, CollectiveArena
from phalanx.shm.segment import SharedSegment


class RankArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Which arena, which rank of it, and how often to exchange."""

    fd: int
    size: int
    rank: int
    num_exchanges: int = 0


def exchange_and_die(context: ChildContext) -> int:
    """Take part in `num_exchanges` barriers, then die without a word."""
    args = msgspec.msgpack.decode(context.args, type=RankArgs)
    arena = CollectiveArena(SharedSegment.attach(args.fd, args.size), args.rank, timeout_s=30)
    context.ready(b"")
    arena.meet()
    for _ in range(args.num_exchanges):
        arena.exchange(Collective.BARRIER, 0)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def sum_in_a_process(context: ChildContext) -> int:
    """Add up random tensors with the other ranks `num_exchanges` times; tell the digest of all sums."""
    import hashlib

    import torch

    from phalanx.workers.shm_group import connect_shm

    args = msgspec.msgpack.decode(context.args, type=RankArgs)
    group = connect_shm(args.fd, rank=args.rank, timeout_s=30)
    generator = torch.Generator().manual_seed(args.rank)
    digest = hashlib.sha256()
    for number in range(args.num_exchanges):
        x = torch.randn(number * 977 % 60_000, generator=generator)
        digest.update(group.all_reduce(x).numpy().tobytes())
    context.ready(digest.digest())
    group.close()
    context.stop_requested.wait()
    return 0
