"""From engine outputs to what a reader gets."""

import asyncio

import msgspec
import pytest

from phalanx.engine.errors import (
    InvalidRequestError,
    QueueFullError,
    ReplicaLostError,
    RequestAbortedError,
    RequestTimeoutError,
)
from phalanx.engine.input_processor import ProcessedRequest
from phalanx.engine.messages import EngineCoreOutput, FinishReason
from phalanx.engine.output_processor import OutputProcessor, RequestStream
from phalanx.engine.outputs import OutputKind
from phalanx.engine.parallel_sampling import fan_out
from phalanx.engine.tokenizer import load_tokenizer
from support.engine import make_request
from support.step_outputs import pack
from support.tokenizers import build_byte_level


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(build_byte_level(tmp_path_factory.mktemp("tokenizer")))


def add(processor, *, stream=None, kind=OutputKind.CUMULATIVE, **request):
    core_request = make_request(**{"eos_token_ids": (2,), **request})
    processor.add_request(ProcessedRequest(core_request=core_request, prompt=None), stream=stream, kind=kind)


def output(*token_ids, **fields):
    return EngineCoreOutput(request_id="r0", new_token_ids=list(token_ids), **fields)


def test_without_a_stream_only_the_final_output_is_made(tokenizer):
    now = [1.0]
    processor = OutputProcessor(tokenizer, clock=lambda: now[0])
    add(processor)
    hello, world = tokenizer.encode("Hello"), tokenizer.encode(" world")

    assert processor.process(pack([output(*hello, num_cached_tokens=4)])).outputs == []
    now[0] = 2.0
    (final,) = processor.process(pack([output(*world, 2, finish_reason=FinishReason.STOP)])).outputs

    assert final.outputs[0].text == "Hello world"
    assert final.outputs[0].token_ids == [*hello, *world, 2]
    assert final.outputs[0].finish_reason is FinishReason.STOP
    assert final.num_cached_tokens == 4
    assert (final.times.arrived_at, final.times.first_token_at, final.times.finished_at) == (0.0, 1.0, 2.0)
    assert processor.num_unfinished_requests == 0


@pytest.mark.parametrize("attempt", [0, 1])
def test_tokens_that_come_alone_make_the_same_text_and_find_the_same_stop_string(tokenizer, attempt):
    processor = OutputProcessor(tokenizer, clock=lambda: 3.0)
    add(processor, stop=("stop",))
    ids = tokenizer.encode("Hello stopping world")

    results = [processor.process(pack([output(token_id, attempt=attempt)])) for token_id in ids]

    finals = [final for result in results for final in result.outputs]
    if attempt == 1:
        assert finals == [], "the request has no such attempt"
        return
    assert [final.outputs[0].text for final in finals] == ["Hello "]
    assert finals[0].outputs[0].stop_reason == "stop"
    assert finals[0].times.first_token_at == 3.0
    assert [result.abort_request_ids for result in results if result.abort_request_ids] == [["r0"]]
    assert processor.num_unfinished_requests == 0


def test_a_stop_string_ends_the_request_here_and_aborts_it_in_the_engine(tokenizer):
    processor = OutputProcessor(tokenizer)
    add(processor, stop=("stop",))
    ids = tokenizer.encode("Hello stopping world")

    result = processor.process(pack([output(*ids)]))

    (final,) = result.outputs
    assert result.abort_request_ids == ["r0"]
    assert final.outputs[0].text == "Hello "
    assert final.outputs[0].stop_reason == "stop"
    assert len(final.outputs[0].token_ids) < len(ids)
    assert processor.process(pack([output(3)])).outputs == []


def test_a_stop_string_before_the_end_token_of_one_step_wins(tokenizer):
    processor = OutputProcessor(tokenizer)
    add(processor, stop=("STOP",))
    ids = [*tokenizer.encode("Hello STOP x"), 2]

    result = processor.process(pack([output(*ids, finish_reason=FinishReason.STOP)]))

    assert result.outputs[0].outputs[0].text == "Hello "
    assert result.outputs[0].outputs[0].stop_reason == "STOP"
    assert result.abort_request_ids == []


def test_text_that_ends_a_grammar_is_shown_where_the_model_has_no_end_token(tokenizer):
    processor = OutputProcessor(tokenizer)
    add(processor, eos_token_ids=())

    result = processor.process(pack([output(*tokenizer.encode("Hello"), finish_reason=FinishReason.STOP)]))

    assert result.outputs[0].outputs[0].text == "Hello"


def test_outputs_of_an_older_attempt_are_dropped(tokenizer):
    processor = OutputProcessor(tokenizer)
    add(processor, attempt=1)

    assert processor.process(pack([output(3, finish_reason=FinishReason.LENGTH)])).outputs == []
    assert processor.num_unfinished_requests == 1


@pytest.mark.parametrize(
    ("fields", "error_type"),
    [
        ({"finish_reason": FinishReason.ABORT}, RequestAbortedError),
        ({"finish_reason": FinishReason.ERROR, "retry_after_s": 2.0}, QueueFullError),
        ({"finish_reason": FinishReason.ERROR, "is_invalid": True, "error": "too long"}, InvalidRequestError),
        ({"finish_reason": FinishReason.ERROR, "error": "lost"}, ReplicaLostError),
    ],
)
def test_an_end_that_is_no_result_is_an_error(tokenizer, fields, error_type):
    processor = OutputProcessor(tokenizer)
    add(processor)

    result = processor.process(pack([output(**fields)]))

    assert type(result.errors["r0"]) is error_type
    assert processor.num_unfinished_requests == 0


def test_what_is_invalid_names_its_field_where_there_is_one(tokenizer):
    for field in ("structured_outputs", None):
        processor = OutputProcessor(tokenizer)
        add(processor)

        refused = output(
            finish_reason=FinishReason.ERROR, is_invalid=True, error="no: never", error_field=field
        )
        result = processor.process(pack([refused]))

        assert result.errors["r0"].field == field


@pytest.mark.parametrize("kind", list(OutputKind))
def test_a_slow_reader_gets_everything_in_one_output(tokenizer, kind):
    ids = tokenizer.encode("Hello world, this is a small corpus")

    async def scenario():
        processor = OutputProcessor(tokenizer)
        stream = RequestStream(kind)
        add(processor, stream=stream, kind=kind)
        processor.process(pack([output(ids[0])]))
        first = await stream.get()
        for token_id in ids[1:]:
            processor.process(pack([output(token_id)]))
        processor.process(pack([output(2, finish_reason=FinishReason.STOP)]))
        return first, await stream.get()

    first, second = asyncio.run(scenario())

    assert second.finished
    assert second.num_output_tokens == len(ids) + 1
    whole = "Hello world, this is a small corpus"
    if kind is OutputKind.DELTA:
        assert first.outputs[0].text + second.outputs[0].text == whole
        assert first.outputs[0].token_ids + second.outputs[0].token_ids == [*ids, 2]
    else:
        assert second.outputs[0].text == whole
        assert second.outputs[0].token_ids == [*ids, 2]


def test_an_error_comes_after_what_was_made_before_it(tokenizer):
    async def scenario():
        processor = OutputProcessor(tokenizer)
        stream = RequestStream(OutputKind.DELTA)
        add(processor, stream=stream, kind=OutputKind.DELTA)
        processor.process(pack([output(*tokenizer.encode("Hello"))]))
        processor.fail_all(ReplicaLostError("gone"))
        first = await stream.get()
        with pytest.raises(ReplicaLostError):
            await stream.get()
        return first

    assert asyncio.run(scenario()).outputs[0].text == "Hello"


def sample(index, *token_ids, **fields):
    return EngineCoreOutput(request_id=f"r0#{index}", new_token_ids=list(token_ids), **fields)


def test_samples_become_one_output_in_the_order_of_their_index(tokenizer):
    processor = OutputProcessor(tokenizer)
    add(processor, n=3, temperature=1.0)
    words = [tokenizer.encode(text) for text in ("Hello", " world", " Paris")]

    results = [
        processor.process(
            pack([sample(index, *words[index], 2, finish_reason=FinishReason.STOP, num_cached_tokens=cached)])
        )
        for index, cached in ((2, 9), (0, 4), (1, 9))
    ]

    assert [result.outputs for result in results[:2]] == [[], []]
    (final,) = results[2].outputs
    assert [completion.text for completion in final.outputs] == ["Hello", " world", " Paris"]
    assert [completion.index for completion in final.outputs] == [0, 1, 2]
    assert final.request_id == "r0"
    assert final.num_cached_tokens == 4
    assert final.num_output_tokens == sum(map(len, words)) + 3
    assert processor.num_unfinished_requests == 0


def test_a_slow_reader_loses_no_sample(tokenizer):
    async def scenario():
        processor = OutputProcessor(tokenizer)
        stream = RequestStream(OutputKind.DELTA)
        add(processor, n=2, temperature=1.0, stream=stream, kind=OutputKind.DELTA)
        hello, world = tokenizer.encode("Hello"), tokenizer.encode(" world")
        processor.process(pack([sample(0, *hello), sample(1, *world)]))
        processor.process(pack([sample(1, *hello, 2, finish_reason=FinishReason.STOP)]))
        processor.process(pack([sample(0, *world, 2, finish_reason=FinishReason.STOP)]))
        return await stream.get()

    output = asyncio.run(scenario())

    assert [completion.text for completion in output.outputs] == ["Hello world", " worldHello"]
    assert output.finished


@pytest.mark.parametrize("kind", OutputKind)
def test_of_samples_to_choose_from_nothing_is_shown_before_the_end(tokenizer, kind):
    async def scenario():
        processor = OutputProcessor(tokenizer)
        stream = RequestStream(kind)
        add(processor, stream=stream, kind=kind, n=1, best_of=2, temperature=1.0)
        hello, world = tokenizer.encode("Hello"), tokenizer.encode(" world")
        processor.process(pack([sample(0, *hello)]))
        first = await stream.get()
        processor.process(pack([sample(1, *world, 2, finish_reason=FinishReason.STOP)]))
        processor.process(pack([sample(0, *world, 2, finish_reason=FinishReason.STOP)]))
        return first, await stream.get()

    first, last = asyncio.run(scenario())

    assert (first.outputs, first.finished) == ([], False)
    # Without log-probabilities all are equal, and the first one wins.
    assert [completion.text for completion in last.outputs] == ["Hello world"]
    assert last.finished


def test_one_failed_sample_fails_the_request_and_aborts_its_siblings(tokenizer):
    processor = OutputProcessor(tokenizer)
    add(processor, n=3, temperature=1.0)

    result = processor.process(pack([sample(1, finish_reason=FinishReason.TIMEOUT)]))

    assert isinstance(result.errors["r0"], RequestTimeoutError)
    assert result.abort_request_ids == ["r0#0", "r0#2"]
    assert processor.num_unfinished_requests == 0
    add(processor)


def test_samples_differ_in_their_seed_alone(tokenizer):
    request = make_request(n=3, temperature=1.0, max_tokens=9, min_tokens=2, stop_token_ids=(5,))
    children = fan_out(ProcessedRequest(core_request=request, prompt=None))

    assert [child.request_id for child in children] == ["r0#0", "r0#1", "r0#2"]
    assert [child.seed for child in children] == [1, 2, 3]
    assert {child.group_id for child in children} == {child.known_as for child in children} == {"r0"}
    for child in children:
        assert msgspec.structs.replace(child.sampling_params, n=3) == request.sampling_params
    largest = msgspec.structs.replace(request, seed=2**63 - 1)
    seeds = [child.seed for child in fan_out(ProcessedRequest(core_request=largest, prompt=None))]
    assert seeds == [2**63 - 1, -(2**63), -(2**63) + 1]
