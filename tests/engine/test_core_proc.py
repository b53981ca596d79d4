"""The engine-core process: real child processes and sockets, a fake executor."""

import asyncio
import contextlib
import select
import time
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
import zmq

from phalanx.engine.core_args import EngineCoreArgs, EngineCoreReady
from phalanx.engine.core_client import CoreSockets
from phalanx.engine.core_control import ControlKind, CoreControl, CoreControlDone, FrontEndGone
from phalanx.engine.core_io import ClientLost, ClientOutputs, CoreInput, CoreOutput
from phalanx.engine.kv_events import KVEventBatch, follow
from phalanx.engine.messages import (
    AbortRequests,
    ClientHello,
    EngineCoreOutputs,
    EngineStats,
    FinishReason,
    FollowPrefixes,
)
from phalanx.engine.prefix_log import split_keys
from phalanx.shm.errors import ProcessDiedError, StartupError
from phalanx.shm.exit_codes import ExitCode
from phalanx.shm.process import ChildSpec, Spawner, wait_all_ready
from phalanx.shm.sockets import MAX_QUEUED_MESSAGES, bind_pull, connect_push
from phalanx.shm.status_board import Phase, StatusBoard
from support.children import is_gone, wait_until
from support.cluster import make_stats
from support.engine import make_engine_config, make_request, simulate
from support.engine_children import POISON_IDLE, POISON_STEP
from support.step_outputs import write_out

DEADLINE_S = 20.0


class CoreProcess:
    """One engine core with the addresses of a cluster of one."""

    def __init__(self, folder, target="support.engine_children:main", **scheduler):
        self.folder = folder
        self.spawner = Spawner("test")
        self.spawner.start()
        self.zmq = zmq.Context()
        self.stats = bind_pull(self.zmq, f"ipc://{folder}/stats")
        self.board = StatusBoard.create(2)
        args = EngineCoreArgs(
            board_fd=self.board.fd,
            num_board_slots=2,
            first_board_slot=1,
            config=make_engine_config(**scheduler),
            dp_rank=3,
            epoch=7,
            input_address=f"ipc://{folder}/core",
            stats_address=f"ipc://{folder}/stats",
            device_indices=[0],
        )
        self.child = self.spawner.spawn(
            ChildSpec(
                role="dp3",
                target=target,
                args=msgspec.msgpack.encode(args),
                rank=3,
                pass_fds=(self.board.fd,),
            )
        )

    def wait_ready(self):
        return wait_all_ready([self.child], time.monotonic() + DEADLINE_S)[0]

    def wait_stats(self, condition):
        deadline = time.monotonic() + DEADLINE_S
        while True:
            assert self.stats.poll(max(0, deadline - time.monotonic()) * 1000), "no such report came"
            stats = msgspec.msgpack.decode(self.stats.recv(), type=EngineStats)
            if condition(stats):
                return stats

    def wait_exit(self):
        assert self.child.wait(DEADLINE_S) is not None
        self.child.receive()
        return self.child.exitcode

    def close(self):
        self.child.stop(reason="end of test", timeout_s=5.0)
        self.spawner.close()
        self.stats.close(linger=0)
        self.zmq.term()
        self.board.close()

    def ask(self, control):
        """Ask as the supervisor does; return the answer."""
        self.child.send(msgspec.msgpack.encode(control))
        answers = []
        wait_until(
            lambda: answers.extend(self.child.receive()) or answers, timeout_s=DEADLINE_S, what="an answer"
        )
        (note,) = answers
        return msgspec.msgpack.decode(note.payload, type=CoreControlDone)


@pytest.fixture
def start(tmp_path_factory):
    with contextlib.ExitStack() as stack:

        def start_one(*args, **kwargs):
            process = CoreProcess(tmp_path_factory.mktemp("s"), *args, **kwargs)
            stack.callback(process.close)
            return process

        yield start_one


@contextlib.asynccontextmanager
async def connect(process, *, client_index=0, incarnation=0):
    sockets = CoreSockets(
        client_index=client_index,
        incarnation=incarnation,
        output_address=f"ipc://{process.folder}/api{client_index}.{incarnation}",
    )
    sockets.connect(3, f"ipc://{process.folder}/core")
    try:
        yield sockets
    finally:
        sockets.close()


async def receive_until_finished(sockets, request_ids):
    tokens, left = {}, set(request_ids)
    async with asyncio.timeout(DEADLINE_S):
        while left:
            message = await sockets.recv()
            assert (message.dp_rank, message.epoch) == (3, 7)
            for output in write_out(message.outputs):
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    left.discard(output.request_id)
    return tokens


def test_two_front_ends_get_their_own_outputs_and_the_process_stops_cleanly(start):
    process = start()
    ready = msgspec.msgpack.decode(process.wait_ready(), type=EngineCoreReady)
    assert ready.pid == process.child.pid
    assert ready.report.num_kv_blocks == 64

    async def scenario():
        async with connect(process) as first, connect(process, client_index=1) as second:
            requests = [make_request(f"a{i}", num_prompt_tokens=5 + i, max_tokens=6) for i in range(4)]
            other = make_request("b", client_index=1, max_tokens=5)
            for request in requests:
                first.send(3, request)
            second.send(3, other)
            tokens = await receive_until_finished(first, [request.request_id for request in requests])
            assert tokens == {request.request_id: simulate(request) for request in requests}
            assert await receive_until_finished(second, ["b"]) == {"b": simulate(other)}

    asyncio.run(scenario())
    stats = process.wait_stats(lambda stats: stats.num_output_tokens_total == 29)
    assert (stats.dp_rank, stats.epoch, stats.num_running) == (3, 7, 0)
    assert process.child.stop(reason="test", timeout_s=5.0) == ExitCode.OK
    assert is_gone(ready.pid)


def test_malformed_messages_harm_nobody(start):
    process = start()
    process.wait_ready()

    async def scenario():
        async with connect(process) as sockets:
            raw = sockets._replicas[3]
            good = msgspec.msgpack.encode(make_request("bad"))
            for data in (
                b"",
                b"\xc1",
                b"\x80",
                good[:-3],
                good.replace(b"temperature", b"temperaturf"),
                b"\x91" * 9000,
            ):
                raw.send(data)
            bad_params = msgspec.to_builtins(make_request("bad", temperature=0.5))
            bad_params["sampling_params"]["temperature"] = -4.0
            raw.send(msgspec.msgpack.encode(bad_params))
            request = make_request("good", max_tokens=3)
            sockets.send(3, request)
            tokens = await receive_until_finished(sockets, ["good"])
            assert tokens["good"] == simulate(request)

    asyncio.run(scenario())


def test_an_aborted_request_frees_its_blocks(start):
    process = start()
    process.wait_ready()

    async def scenario():
        async with connect(process) as sockets:
            sockets.send(3, make_request("a", max_tokens=None, num_prompt_tokens=3))
            sockets.send(3, AbortRequests(request_ids=["a", "unknown"]))
            sockets.send(3, make_request("b", max_tokens=2))
            await receive_until_finished(sockets, ["b"])

    asyncio.run(scenario())
    process.wait_stats(
        lambda stats: (
            stats.num_output_tokens_total >= 2
            and stats.num_running == stats.num_waiting == 0
            and stats.kv_usage == 0
        )
    )


def test_reports_name_the_last_request_of_each_front_end_that_they_count(start):
    process = start()
    process.wait_ready()

    async def scenario():
        async with connect(process, client_index=2, incarnation=5) as sockets:
            for number in (4, 9):
                request = make_request(f"r{number}", client_index=2, num_prompt_tokens=9, max_tokens=3)
                sockets.send(3, msgspec.structs.replace(request, number=number, incarnation=5))
            await receive_until_finished(sockets, ["r4", "r9"])

    asyncio.run(scenario())

    stats = process.wait_stats(lambda stats: stats.admitted != [] and stats.num_output_tokens_total == 6)
    assert [(mark.client_index, mark.incarnation, mark.number) for mark in stats.admitted] == [(2, 5, 9)]
    assert 0 < stats.busy_s < DEADLINE_S


def test_a_restarted_front_end_leaves_nothing_of_its_earlier_life(start):
    process = start(max_num_seqs=1)
    process.wait_ready()

    async def scenario():
        async with connect(process) as old:
            for i in range(3):
                old.send(3, make_request(f"old{i}", num_prompt_tokens=4, max_tokens=200))
            await old.recv()
        async with connect(process, incarnation=1) as new:
            new.send(3, msgspec.structs.replace(make_request("new", max_tokens=2), incarnation=1))
            async with asyncio.timeout(DEADLINE_S):
                message = await new.recv()
            assert [output.request_id for output in message.outputs.others] == ["new"]

    asyncio.run(scenario())


def test_what_a_front_end_that_died_has_asked_is_dropped_at_once(start):
    process = start()
    process.wait_ready()
    pause = CoreControl(call_id=1, kind=ControlKind.PAUSE, timeout_s=5.0)
    process.ask(pause)

    def wait_for_requests(number):
        wait_until(
            lambda: (process.board.read(1).phase, process.board.read(1).call_id) == (Phase.PAUSED, number),
            timeout_s=DEADLINE_S,
            what=f"{number} requests that wait",
        )

    def tell_gone(incarnation):
        process.child.send(msgspec.msgpack.encode(FrontEndGone(client_index=2, incarnation=incarnation)))
        process.ask(pause)  # the answer comes after what was said before has been done

    async def scenario():
        async with connect(process, client_index=2, incarnation=4) as sockets, connect(process) as other:
            sockets.send(3, msgspec.structs.replace(make_request("a", client_index=2), incarnation=4))
            other.send(3, make_request("b"))
            await asyncio.to_thread(wait_for_requests, 2)
            tell_gone(3)
            await asyncio.to_thread(wait_for_requests, 2)
            tell_gone(4)
            await asyncio.to_thread(wait_for_requests, 1)

    asyncio.run(scenario())


def test_a_stop_ends_running_requests_with_an_abort(start):
    process = start(max_num_seqs=1)
    process.wait_ready()

    async def scenario():
        async with connect(process) as sockets:
            for i in range(30):
                sockets.send(3, make_request(f"r{i}", num_prompt_tokens=3, max_tokens=240))
            await sockets.recv()
            process.child.terminate()
            reasons = {}
            async with asyncio.timeout(DEADLINE_S):
                while len(reasons) < 30:
                    for output in (await sockets.recv()).outputs.others:
                        if output.finish_reason is not None:
                            reasons[output.request_id] = output.finish_reason
            assert reasons["r29"] is FinishReason.ABORT

    asyncio.run(scenario())
    assert process.wait_exit() == ExitCode.OK


@pytest.mark.parametrize("poison", [POISON_STEP, POISON_IDLE])
def test_the_death_of_a_worker_ends_the_replica_and_names_the_rank(start, poison):
    process = start()
    process.wait_ready()

    async def scenario():
        async with connect(process) as sockets:
            sockets.send(3, make_request("a", prompt_token_ids=[poison, 1], max_tokens=1))
            await asyncio.to_thread(select.select, [process.child.pidfd], [], [], DEADLINE_S)

    asyncio.run(scenario())
    assert process.wait_exit() == ExitCode.WORKER_LOST
    assert "dp0 tp1 was killed by signal 9" in str(process.child.death(ProcessDiedError))


def test_a_start_that_fails_says_why(start):
    process = start("support.engine_children:main_that_fails_to_start")

    with pytest.raises(StartupError, match="no such device"):
        process.wait_ready()

    assert process.wait_exit() == ExitCode.BOOT_FAILED


def test_an_idle_engine_core_uses_no_processor_time(start):
    process = start()
    process.wait_ready()
    process.wait_stats(lambda stats: True)

    def cpu_ticks():
        fields = Path(f"/proc/{process.child.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = cpu_ticks()
    # The next report at rest comes two seconds later; a loop that spins would have burnt them.
    process.wait_stats(lambda stats: True)

    assert cpu_ticks() - before <= 10


def test_a_front_end_that_follows_the_prefix_cache_knows_what_it_holds_also_after_a_gap(start):
    process = start()
    process.wait_ready()
    request = make_request("a", num_prompt_tokens=9, max_tokens=8)

    async def scenario():
        async with asyncio.timeout(DEADLINE_S), connect(process) as sockets:
            sockets.send(3, FollowPrefixes(client_index=0))
            sockets.send(3, request)
            held, sequences, num_tokens = set(), [], 0
            # 16 of the 17 tokens are computed: four blocks of four.
            while len(held) < 4 or num_tokens < 8:
                message = await sockets.recv()
                num_tokens += sum(len(output.new_token_ids) for output in write_out(message.outputs))
                if (delta := message.prefix_delta) is not None:
                    held |= set(split_keys(delta.stored))
                    sequences.append(delta.sequence)
            sockets.send(3, FollowPrefixes(client_index=0))
            snapshot = (await sockets.recv()).prefix_delta
            reset = asyncio.create_task(sockets.reset_prefix_cache(3))
            cleared = (await sockets.recv()).prefix_delta
            return sequences, held, snapshot, cleared, await reset

    sequences, held, snapshot, cleared, is_reset = asyncio.run(scenario())

    # The first is what was held when it began to follow: nothing, after the delta before the first.
    assert sequences == list(range(-1, len(sequences) - 1))
    assert snapshot.clears
    assert set(split_keys(snapshot.stored)) == held
    assert snapshot.sequence == sequences[-1]
    assert cleared.clears
    assert (cleared.stored, cleared.sequence) == (b"", sequences[-1] + 1)
    assert is_reset


def test_a_listener_outside_follows_the_prefix_cache_and_asks_for_what_it_missed(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kv")
    process = start(
        kv_events=True,
        kv_events_address=f"ipc://{folder}/pub{{dp_rank}}",
        kv_events_replay_address=f"ipc://{folder}/replay{{dp_rank}}",
    )
    process.wait_ready()

    async def ask_one():
        async with connect(process) as sockets:
            sockets.send(3, make_request("a", num_prompt_tokens=9, max_tokens=3))
            await receive_until_finished(sockets, ["a"])

    asyncio.run(ask_one())
    question = process.zmq.socket(zmq.REQ)
    question.connect(f"ipc://{folder}/replay3")
    question.send((0).to_bytes(8, "big", signed=True))
    assert question.poll(DEADLINE_S * 1000)
    batches = msgspec.msgpack.decode(question.recv(), type=list[KVEventBatch])
    question.close(linger=0)

    held = set()
    follow(held, batches)
    assert [batch.sequence for batch in batches] == list(range(len(batches)))
    assert len(held) == 11 // 4


def test_it_says_on_the_board_what_it_does_also_at_rest(start):
    process = start()
    process.wait_ready()

    def status():
        return process.board.read(1)

    wait_until(lambda: status().phase is Phase.IDLE, timeout_s=DEADLINE_S, what="rest")
    since_at = status().since_at
    wait_until(lambda: status().since_at > since_at, timeout_s=DEADLINE_S, what="another look at rest")

    async def scenario():
        async with connect(process) as sockets:
            sockets.send(3, make_request("a", max_tokens=4))
            await receive_until_finished(sockets, ["a"])

    asyncio.run(scenario())
    wait_until(
        lambda: (status().phase, status().call_id, status().step) == (Phase.IDLE, 0, 4),
        timeout_s=DEADLINE_S,
        what="four steps and no request",
    )


def test_a_pause_holds_requests_until_its_end(start):
    process = start()
    process.wait_ready()
    assert process.ask(CoreControl(call_id=1, kind=ControlKind.PAUSE, timeout_s=5.0)).call_id == 1
    request = make_request("a", max_tokens=4)

    async def scenario():
        async with connect(process) as sockets:
            sockets.send(3, request)
            await asyncio.to_thread(
                wait_until,
                lambda: (process.board.read(1).phase, process.board.read(1).call_id) == (Phase.PAUSED, 1),
                timeout_s=DEADLINE_S,
                what="a request that waits",
            )
            process.child.send(
                msgspec.msgpack.encode(CoreControl(call_id=2, kind=ControlKind.RESUME, timeout_s=5.0))
            )
            tokens = await receive_until_finished(sockets, ["a"])
            assert tokens["a"] == simulate(request)

    asyncio.run(scenario())


def fail(*args):
    raise ValueError("a bug")


def test_a_front_end_that_reads_nothing_for_long_loses_no_output(tmp_path):
    """Its event loop may be held up. More than the sockets' usual bounds of both ends take together."""
    num_messages = 3 * MAX_QUEUED_MESSAGES
    output = CoreOutput(f"ipc://{tmp_path}/stats", SimpleQueue())
    output.start()
    address = f"ipc://{tmp_path}/outputs"
    with (
        zmq.Context() as context,
        bind_pull(context, f"ipc://{tmp_path}/stats") as stats,
        bind_pull(context, address) as outputs,
    ):
        output.put(ClientHello(client_index=0, incarnation=0, output_address=address))
        for number in range(num_messages):
            output.put(ClientOutputs(client_index=0, outputs=EngineCoreOutputs(dp_rank=0, epoch=number)))
        output.put(make_stats())
        assert stats.poll(1000 * DEADLINE_S), "what was handed over later comes later"
        for number in range(num_messages):
            assert outputs.poll(1000 * DEADLINE_S), f"lost after {number}"
            assert msgspec.msgpack.decode(outputs.recv())["epoch"] == number
    output.close()


def test_what_waits_for_a_front_end_that_is_gone_is_dropped(tmp_path):
    output = CoreOutput(None, SimpleQueue())
    output.start()
    output.put(ClientHello(client_index=0, incarnation=0, output_address=f"ipc://{tmp_path}/outputs"))
    output.put(ClientLost(0))
    output.put(ClientOutputs(client_index=0, outputs=EngineCoreOutputs(dp_rank=0, epoch=0)))

    wait_until(lambda: output.num_dropped == 1, timeout_s=DEADLINE_S)
    output.close()


def test_a_thread_that_fails_in_sending_says_so_and_is_closed_like_any_other(monkeypatch):
    inbox = SimpleQueue()
    output = CoreOutput(None, inbox)
    monkeypatch.setattr(output, "_send", fail)
    output.start()

    output.put(ClientOutputs(client_index=0, outputs=EngineCoreOutputs(dp_rank=0, epoch=0)))

    failed = inbox.get(timeout=DEADLINE_S)
    assert (failed.name, str(failed.error)) == ("core-output", "a bug")
    output.close()


def test_a_thread_that_fails_in_receiving_says_so_and_is_closed_like_any_other(tmp_path, monkeypatch):
    inbox = SimpleQueue()
    core_input = CoreInput(f"ipc://{tmp_path}/core", inbox)
    monkeypatch.setattr(core_input, "_take", fail)
    core_input.start()
    context = zmq.Context()
    socket = connect_push(context, f"ipc://{tmp_path}/core")

    socket.send(b"anything")

    failed = inbox.get(timeout=DEADLINE_S)
    assert (failed.name, str(failed.error)) == ("core-input", "a bug")
    core_input.close()
    socket.close(linger=0)
    context.term()
