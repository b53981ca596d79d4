"""The front end's client over all replicas, with its sockets, and without any replica."""

import asyncio
import time
from pathlib import Path

import msgspec

from phalanx.cluster.dp_client import DpClient
from phalanx.cluster.messages import FleetUpdate, FrontEndConnection, ReplicaInfo, ReplicaState
from phalanx.engine.messages import EngineCoreOutput, FinishReason
from support.engine import make_request

DEADLINE_S = 20.0


def test_the_deadline_of_a_request_counts_also_while_it_waits_for_a_replica(tmp_path: Path) -> None:
    async def run() -> list[EngineCoreOutput]:
        client = DpClient(
            FrontEndConnection(
                client_index=0,
                incarnation=0,
                output_address=f"ipc://{tmp_path}/outputs",
                snapshot_address=f"ipc://{tmp_path}/loads",
            ),
            replay_wait_s=10 * DEADLINE_S,
        )
        await client.start()
        try:
            lost = ReplicaInfo(
                dp_rank=0, epoch=0, state=ReplicaState.LOST, input_address=f"ipc://{tmp_path}/core"
            )
            client.apply(FleetUpdate(replicas=[lost]))
            await client.add_request(make_request("patient"))
            hasty = msgspec.structs.replace(make_request("hasty"), deadline_at=time.monotonic() + 0.05)
            await client.add_request(hasty)
            async with asyncio.timeout(DEADLINE_S):
                outputs = await client.get_outputs()
            assert client.replay_stats.num_parked == 1
            return outputs.others
        finally:
            await client.close()

    (output,) = asyncio.run(run())

    assert (output.request_id, output.finish_reason) == ("hasty", FinishReason.TIMEOUT)
