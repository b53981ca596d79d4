"""AsyncLLM and LLM: from prompts to text, over a fake model."""

import asyncio
import contextlib
import os
import signal
import threading

import pytest

from phalanx.engine import async_llm
from phalanx.engine.async_llm import AsyncLLM
from phalanx.engine.core import EngineCore
from phalanx.engine.core_client import ProcessCoreClient
from phalanx.engine.errors import (
    InvalidRequestError,
    QueueFullError,
    ReplicaLostError,
    RequestAbortedError,
    RequestTimeoutError,
)
from phalanx.engine.inproc_client import InprocCoreClient
from phalanx.engine.input_processor import InputProcessor, RequestOptions
from phalanx.engine.messages import EngineCoreOutput, FinishReason
from phalanx.engine.outputs import OutputKind
from phalanx.engine.tokenizer import load_tokenizer
from phalanx.workers.sampling_params import SamplingParams
from support.engine import make_engine_config, make_request, simulate
from support.engine_children import POISON_STEP, FakeExecutor
from support.step_outputs import pack
from support.tokenizers import build_byte_level

DEADLINE_S = 20.0
TARGET = "support.engine_children:main"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    tokenizer = load_tokenizer(build_byte_level(tmp_path_factory.mktemp("tokenizer")))
    return InputProcessor(tokenizer, eos_token_ids=[], max_model_len=250, vocab_size=97)


@contextlib.asynccontextmanager
async def launch(inputs, **scheduler):
    client = await asyncio.to_thread(ProcessCoreClient.launch, make_engine_config(**scheduler), target=TARGET)
    async with asyncio.timeout(3 * DEADLINE_S), AsyncLLM(client, inputs) as llm:
        yield llm, client


def params(max_tokens, **kwargs):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **kwargs)


async def collect(llm, prompt, sampling_params):
    token_ids, text = [], ""
    async for output in llm.generate(prompt, sampling_params):
        token_ids += output.outputs[0].token_ids
        text += output.outputs[0].text
    return token_ids, text


async def collect_all(stream):
    return [output async for output in stream]


def expected_tokens(prompt, max_tokens):
    return simulate(make_request(prompt_token_ids=prompt, max_tokens=max_tokens))


def test_many_streams_at_once_get_each_their_own(inputs):
    async def scenario():
        async with launch(inputs) as (llm, _):
            prompts = [[i, 2, 3] for i in range(20)]
            return await asyncio.gather(*[collect(llm, prompt, params(8)) for prompt in prompts])

    results = asyncio.run(scenario())

    for i, (token_ids, text) in enumerate(results):
        assert token_ids == expected_tokens([i, 2, 3], 8)
        assert text == inputs.tokenizer.decode(token_ids)


def test_leaving_early_and_cancelling_abort_the_request(inputs):
    async def scenario():
        async with launch(inputs, max_num_seqs=1) as (llm, _):
            left = llm.generate([1, 2], params(240))
            await anext(left)
            await left.aclose()
            task = asyncio.create_task(collect(llm, [1, 3], params(240)))
            while not llm.num_unfinished_requests:
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert llm.num_unfinished_requests == 0
            # With one place in the engine, this one runs only when the others are gone there too.
            return await collect(llm, [1, 4], params(3))

    token_ids, _ = asyncio.run(scenario())

    assert token_ids == expected_tokens([1, 4], 3)


def test_cumulative_outputs_hold_everything_so_far(inputs):
    async def scenario():
        async with launch(inputs) as (llm, _):
            stream = llm.generate([5, 6], params(6), output_kind=OutputKind.CUMULATIVE)
            return [output async for output in stream]

    outputs = asyncio.run(scenario())

    whole = expected_tokens([5, 6], 6)
    for output in outputs:
        token_ids = output.outputs[0].token_ids
        assert token_ids == whole[: len(token_ids)]
    assert outputs[-1].outputs[0].token_ids == whole
    assert outputs[-1].finished
    assert outputs[-1].times.finished_at >= outputs[-1].times.first_token_at >= outputs[-1].times.arrived_at


def test_a_stop_string_ends_the_stream_before_it(inputs):
    whole = inputs.tokenizer.decode(expected_tokens([7, 8], 20))
    stop = whole[6:9]

    async def scenario():
        async with launch(inputs) as (llm, _):
            return await collect(llm, [7, 8], params(20, stop=(stop,)))

    _, text = asyncio.run(scenario())

    assert text == whole[: whole.index(stop)]


def test_a_bad_request_and_a_full_queue_fail_before_the_first_output(inputs):
    async def scenario():
        async with launch(inputs, max_num_seqs=1, max_num_waiting=1) as (llm, _):
            with pytest.raises(InvalidRequestError):
                await anext(llm.generate([], params(3)))
            running = llm.generate([1, 2], params(200), "same")
            await anext(running)
            with pytest.raises(InvalidRequestError, match="is running"):
                await anext(llm.generate([1, 2], params(3), "same"))
            results = await asyncio.gather(
                *[collect(llm, [1, i], params(2)) for i in range(30)], return_exceptions=True
            )
            await running.aclose()
            return results

    results = asyncio.run(scenario())

    refused = [result for result in results if isinstance(result, QueueFullError)]
    assert len(refused) >= 1
    assert all(isinstance(result, QueueFullError | tuple) for result in results)


@pytest.mark.parametrize("how", ["worker", "sigkill"])
def test_a_lost_engine_ends_every_stream_and_every_later_call(inputs, how):
    async def scenario():
        async with launch(inputs) as (llm, client):
            if how == "worker":
                prompts = [[POISON_STEP, i] for i in range(3)]
            else:
                # Stopped first, so that nothing is finished when it is killed.
                os.kill(client._child.pid, signal.SIGSTOP)
                prompts = [[1, i] for i in range(3)]
            streams = [asyncio.create_task(collect(llm, prompt, params(9))) for prompt in prompts]
            while llm.num_unfinished_requests < 3:
                await asyncio.sleep(0)
            if how == "sigkill":
                os.kill(client._child.pid, signal.SIGKILL)
            results = await asyncio.gather(*streams, return_exceptions=True)
            assert [type(result) for result in results] == [ReplicaLostError] * 3
            assert ("tp1" if how == "worker" else "signal 9") in str(results[0])
            with pytest.raises(ReplicaLostError):
                await anext(llm.generate([1, 2], params(3)))
            assert llm.num_unfinished_requests == 0
            assert await llm.wait_failed() is llm.error

    asyncio.run(scenario())


def test_a_bug_in_the_task_that_takes_outputs_ends_every_stream_and_is_told(inputs, monkeypatch):
    async def scenario():
        async with launch(inputs) as (llm, client):

            async def get_outputs():
                raise ValueError("a bug")

            running = llm.generate([1, 2], params(240))
            await anext(running)
            monkeypatch.setattr(client, "get_outputs", get_outputs)

            assert "a bug" in str(await llm.wait_failed())
            with pytest.raises(ReplicaLostError, match="a bug"):
                async for _ in running:
                    pass

    asyncio.run(scenario())


def test_closing_ends_streams_and_the_process(inputs):
    async def scenario():
        async with launch(inputs) as (llm, client):
            running = llm.generate([1, 2], params(240))
            await anext(running)
            await llm.close()
            with pytest.raises(RequestAbortedError):
                async for _ in running:
                    pass
            await llm.close()
            return client._child.exitcode

    assert asyncio.run(scenario()) == 0


def test_the_in_process_client_turns_a_dead_worker_into_a_lost_replica():
    executor = FakeExecutor()
    client = InprocCoreClient(EngineCore(make_engine_config(), executor, executor.start()))
    client.add_request(make_request(prompt_token_ids=[POISON_STEP]))

    with pytest.raises(ReplicaLostError, match="tp1"):
        client.get_outputs()

    client.close(reason="test")
    assert executor.close_reason == "test"


def test_a_reset_forgets_all_cached_prefixes(inputs):
    async def scenario():
        async with launch(inputs) as (llm, _):
            prompt = list(range(1, 20))
            await collect(llm, prompt, params(2))
            cached = [output.num_cached_tokens async for output in llm.generate(prompt, params(1))]
            when_idle = await llm.reset_prefix_cache()
            fresh = [output.num_cached_tokens async for output in llm.generate(prompt, params(1))]
            return cached[-1] > 0, when_idle, fresh[-1]

    assert asyncio.run(scenario()) == (True, True, 0)


def test_a_lost_engine_ends_a_call_that_waits_for_it(inputs):
    async def scenario():
        async with launch(inputs) as (llm, client):
            os.kill(client._child.pid, signal.SIGSTOP)
            call = asyncio.create_task(llm.reset_prefix_cache())
            os.kill(client._child.pid, signal.SIGKILL)
            with pytest.raises(ReplicaLostError):
                await call

    asyncio.run(scenario())


def test_samples_come_side_by_side_and_share_the_prompt(inputs):
    async def scenario():
        async with launch(inputs) as (llm, _):
            texts, prompt = {}, list(range(1, 30))
            async for output in llm.generate(prompt, params(6, n=3, temperature=1.0, seed=1)):
                for completion in output.outputs:
                    texts.setdefault(completion.index, []).extend(completion.token_ids)
            return texts, output

    texts, last = asyncio.run(scenario())

    expected = expected_tokens(list(range(1, 30)), 6)
    assert texts == dict.fromkeys(range(3), expected)
    assert last.finished
    assert last.num_output_tokens == 18
    assert last.num_cached_tokens == 0


def test_a_request_that_is_late_fails_and_the_next_one_works(inputs):
    async def scenario():
        async with launch(inputs) as (llm, _):
            late = llm.generate([1, 2, 3], params(200), options=RequestOptions(timeout_s=1e-6))
            with pytest.raises(RequestTimeoutError):
                async for _ in late:
                    pass
            return await collect(llm, [1, 2, 3], params(4))

    token_ids, _ = asyncio.run(scenario())
    assert token_ids == expected_tokens([1, 2, 3], 4)


class HeldClient:
    """A CoreClient whose outputs the test gives. Event loop only."""

    def __init__(self):
        self.requests, self.aborted = [], []
        self._outputs = asyncio.Queue()

    async def start(self):
        pass

    async def add_request(self, request):
        self.requests.append(request)

    async def abort_requests(self, request_ids):
        self.aborted += request_ids

    async def get_outputs(self):
        outputs = await self._outputs.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    async def close(self):
        pass

    def give(self, *outputs):
        """Outputs of one step; an exception: the engine is lost."""
        self._outputs.put_nowait(outputs[0] if isinstance(outputs[0], Exception) else pack(list(outputs)))


async def turns(condition):
    """Let others have their turns until something is so."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("num_samples", [1, 2])
def test_an_id_used_again_after_an_abort_gets_nothing_of_the_request_before(inputs, num_samples):
    sampling = params(2, n=num_samples, temperature=1.0)

    async def scenario():
        client = HeldClient()
        async with AsyncLLM(client, inputs) as llm:
            before = llm.generate([1, 2], sampling, "same")
            first = asyncio.create_task(anext(before))
            await turns(lambda: len(client.requests) == num_samples)
            old_ids = [request.request_id for request in client.requests]
            client.give(EngineCoreOutput(request_id=old_ids[0], new_token_ids=[7]))
            assert (await first).outputs[0].token_ids == [7]
            await before.aclose()
            assert client.aborted == old_ids

            again = asyncio.create_task(collect_all(llm.generate([3, 4], sampling, "same")))
            await turns(lambda: len(client.requests) == 2 * num_samples)
            new_ids = [request.request_id for request in client.requests[num_samples:]]
            # What the engine had made before it saw the abort.
            late = [EngineCoreOutput(request_id=name, new_token_ids=[8]) for name in old_ids]
            ends = [
                EngineCoreOutput(request_id=name, new_token_ids=[9], finish_reason=FinishReason.LENGTH)
                for name in old_ids
            ]
            client.give(*late)
            client.give(*ends)
            for token_id, finish_reason in ((20, None), (21, FinishReason.LENGTH)):
                client.give(
                    *[
                        EngineCoreOutput(
                            request_id=name, new_token_ids=[token_id], finish_reason=finish_reason
                        )
                        for name in new_ids
                    ]
                )
            return await again

    outputs = asyncio.run(scenario())

    made = {}
    for output in outputs:
        assert output.request_id == "same"
        for completion in output.outputs:
            made.setdefault(completion.index, []).extend(completion.token_ids)
    assert made == {index: [20, 21] for index in range(num_samples)}


def test_an_abort_by_another_task_ends_the_iterator(inputs):
    async def scenario():
        client = HeldClient()
        async with AsyncLLM(client, inputs) as llm:
            reader = asyncio.create_task(collect_all(llm.generate([1, 2], params(5), "left")))
            await turns(lambda: client.requests)
            await llm.abort("left")
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(RequestAbortedError):
                    await reader
            assert client.aborted == [client.requests[0].request_id]
            assert llm.num_unfinished_requests == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("event", ["lost", "close", "abort"])
def test_what_happens_while_samples_are_sent_leaves_none_behind(inputs, event):
    async def scenario():
        client = HeldClient()
        async with AsyncLLM(client, inputs) as llm:
            sampling = params(5, n=64, temperature=1.0)
            reader = asyncio.create_task(collect_all(llm.generate([1, 2], sampling, "left")))
            await turns(lambda: client.requests)
            assert len(client.requests) < 64
            if event == "lost":
                client.give(ReplicaLostError("gone"))
                await turns(lambda: llm.error is not None)
            elif event == "close":
                await llm.close()
            else:
                await llm.abort("left")
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(ReplicaLostError if event == "lost" else RequestAbortedError):
                    await reader
            assert len(client.requests) < 64
            if event == "abort":
                assert {request.request_id for request in client.requests} <= set(client.aborted)

    asyncio.run(scenario())


@pytest.mark.parametrize("event", ["lost", "abort"])
def test_what_happens_while_a_long_prompt_is_read_is_not_missed(inputs, event):
    async def scenario():
        client, may_go_on = HeldClient(), threading.Event()
        process = inputs.process

        def held(*args, **kwargs):
            may_go_on.wait(DEADLINE_S)
            return process(*args, **kwargs)

        async with AsyncLLM(client, inputs) as llm:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(inputs, "process", held)
                patch.setattr(async_llm, "LONG_PROMPT", 1)
                reader = asyncio.create_task(collect_all(llm.generate([1, 2, 3], params(5), "long")))
                await asyncio.sleep(0)
                if event == "lost":
                    client.give(ReplicaLostError("gone"))
                    await llm.wait_failed()
                else:
                    await llm.abort("long")
                may_go_on.set()
                async with asyncio.timeout(DEADLINE_S):
                    with pytest.raises(ReplicaLostError if event == "lost" else RequestAbortedError):
                        await reader
            assert client.requests == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prompt", "request_id", "field"),
    [
        (None, "a", "prompt"),
        (5, "a", "prompt"),
        ([1], 5, "request_id"),
        ([1], [], "request_id"),
        ([1], "\ud800", "request_id"),
    ],
)
def test_what_no_engine_core_could_read_is_refused_with_its_field(inputs, prompt, request_id, field):
    async def scenario():
        client = HeldClient()
        async with AsyncLLM(client, inputs) as llm:
            with pytest.raises(InvalidRequestError) as caught:
                await collect_all(llm.generate(prompt, params(5), request_id))
        return caught.value.field, client.requests

    assert asyncio.run(scenario()) == (field, [])


def test_starts_at_the_same_time_connect_once(inputs):
    class SlowClient(HeldClient):
        num_starts = 0

        async def start(self):
            self.num_starts += 1
            await asyncio.sleep(0)

    async def scenario():
        client = SlowClient()
        llm = AsyncLLM(client, inputs)
        await asyncio.gather(llm.start(), llm.start())
        await llm.close()
        return client.num_starts

    assert asyncio.run(scenario()) == 1


def test_front_ends_that_share_an_engine_never_use_the_same_id(inputs):
    async def scenario():
        clients = [HeldClient(), HeldClient()]
        async with AsyncLLM(clients[0], inputs) as one, AsyncLLM(clients[1], inputs, client_index=1) as other:
            readers = [
                asyncio.create_task(collect_all(llm.generate([1, 2], params(5), "same")))
                for llm in (one, other)
            ]
            await turns(lambda: all(client.requests for client in clients))
            for client in clients:
                (request,) = client.requests
                client.give(
                    EngineCoreOutput(
                        request_id=request.request_id, new_token_ids=[3], finish_reason=FinishReason.LENGTH
                    )
                )
            await asyncio.gather(*readers)
            return [client.requests[0] for client in clients]

    requests = asyncio.run(scenario())

    assert requests[0].request_id != requests[1].request_id
    assert [request.known_as for request in requests] == ["same", "same"]
