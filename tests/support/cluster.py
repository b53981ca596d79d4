"""Builders for cluster tests."""

import msgspec

from phalanx.engine.messages import EngineStats


def make_stats(dp_rank: int = 0, **changes: float) -> EngineStats:
    stats = EngineStats(
        dp_rank=dp_rank,
        epoch=0,
        sequence=1,
        reported_at=0.0,
        num_waiting=0,
        num_running=0,
        num_prefill_tokens=0,
        kv_usage=0.0,
        num_free_blocks=100,
        num_free_tokens=1600,
        num_blocks=101,
    )
    return msgspec.structs.replace(stats, **changes)
