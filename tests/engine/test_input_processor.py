"""What reaches an engine core is whole and right; everything else names its field."""

import pytest

from phalanx.engine.block_hash import extend_block_hashes, extra_keys_of
from phalanx.engine.errors import InvalidRequestError
from phalanx.engine.input_processor import InputProcessor, RequestOptions
from phalanx.engine.tokenizer import load_tokenizer
from phalanx.workers.sampling_params import SamplingParams
from support.tokenizers import build_byte_level


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    tokenizer = load_tokenizer(
        build_byte_level(tmp_path_factory.mktemp("tokenizer"), chat_template="{{ messages[0].content }}")
    )
    return InputProcessor(
        tokenizer, eos_token_ids=[5, 2], max_model_len=32, vocab_size=400, clock=lambda: 7.0
    )


def test_a_text_is_tokenised_and_completed(inputs):
    processed = inputs.process("r", "Hello world", SamplingParams(max_tokens=None))

    request = processed.core_request
    assert processed.prompt == "Hello world"
    assert request.prompt_token_ids == inputs.tokenizer.encode("Hello world")
    assert request.sampling_params.max_tokens == 32 - len(request.prompt_token_ids)
    assert request.eos_token_ids == (5, 2)
    assert request.arrived_at == 7.0
    assert 0 <= request.seed < 2**63


def test_a_given_seed_stays(inputs):
    assert inputs.process("r", [1, 2], SamplingParams(seed=-5)).core_request.seed == -5


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([400], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([True], {}, "prompt"),
        ([1.5], {}, "prompt"),
        (["a"], {}, "prompt"),
        ([1] * 32, {"max_tokens": None}, "prompt"),
        ("x" * 100_000, {}, "prompt"),
        ([1] * 31, {"max_tokens": 2}, "max_tokens"),
        ([1] * 30, {"max_tokens": None, "min_tokens": 3}, "min_tokens"),
        ([1], {"stop_token_ids": (400,)}, "stop_token_ids"),
        ([1], {"logit_bias": {400: 1.0}}, "logit_bias"),
        ([1], {"allowed_token_ids": (3, 400)}, "allowed_token_ids"),
        ([1], {"bad_words_token_ids": ((3,), (3, 400))}, "bad_words_token_ids"),
        ([1], {"bad_words": ("word " * 1025,)}, "bad_words"),
        ([1], {"logprobs": 21}, "logprobs"),
        ([1], {"logprobs": -1}, "logprobs"),
        ([1], {"prompt_logprobs": 21}, "prompt_logprobs"),
        (None, {}, "prompt"),
        (b"text", {}, "prompt"),
        ({"prompt": "text"}, {}, "prompt"),
        # Half of a pair of UTF-16, which Python takes for a character and nobody else does.
        ("a\ud800", {}, "prompt"),
        ([1], {"stop": ("a", "\udfff")}, "stop"),
        ([1], {"bad_words": ("\ud800",)}, "bad_words"),
    ],
)
def test_a_request_that_cannot_be_served_names_its_field(inputs, prompt, params, field):
    with pytest.raises(InvalidRequestError) as caught:
        inputs.process("r", prompt, SamplingParams(**params))

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 1.5),
        ("priority", True),
        ("priority", 2**31),
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("cache_salt", "\ud800"),
        ("timeout_s", "1"),
        ("timeout_s", float("nan")),
        ("timeout_s", True),
        ("dp_rank", 1.0),
        ("dp_rank", "1"),
        ("dp_rank", -1),
        ("session_id", 7),
        ("session_id", "\ud800"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_before_an_engine_core_sees_it(inputs, field, value):
    with pytest.raises(InvalidRequestError) as caught:
        inputs.process("r", [1], SamplingParams(), options=RequestOptions(**{field: value}))

    assert caught.value.field == field


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_without_a_limit_there_are_no_more_logprobs_than_tokens(inputs, field):
    unlimited = InputProcessor(
        inputs.tokenizer, eos_token_ids=(5,), max_model_len=32, vocab_size=400, max_logprobs=-1
    )

    for wanted in (-1, 400):
        request = unlimited.process("r", [1], SamplingParams(**{field: wanted})).core_request
        assert getattr(request.sampling_params, field) == wanted
    for wanted in (401, 10**30):
        with pytest.raises(InvalidRequestError) as caught:
            unlimited.process("r", [1], SamplingParams(**{field: wanted}))
        assert caught.value.field == field


def test_the_longest_prompt_leaves_room_for_one_token(inputs):
    request = inputs.process("r", [1] * 31, SamplingParams(max_tokens=None)).core_request

    assert request.sampling_params.max_tokens == 1


def test_a_chat_is_rendered_without_further_special_tokens(inputs):
    ids = inputs.render_chat([{"role": "user", "content": "<|im_start|>Hello"}])

    assert ids == [1, *inputs.tokenizer.encode("Hello", add_special_tokens=False)]


def test_full_blocks_are_hashed_once_the_block_size_is_known_and_apart_for_each_salt(inputs):
    prompt = list(range(1, 10))
    assert inputs.process("r", prompt, SamplingParams()).core_request.block_hashes == []
    inputs.block_size = 4

    plain = inputs.process("r", prompt, SamplingParams()).core_request
    salted = inputs.process(
        "r", prompt, SamplingParams(), options=RequestOptions(cache_salt="a")
    ).core_request

    for request in (plain, salted):
        expected: list[bytes] = []
        extend_block_hashes(expected, prompt, 4, extra_keys_of(request.cache_salt))
        assert request.block_hashes == expected
    assert len(plain.block_hashes) == 2
    assert not set(plain.block_hashes) & set(salted.block_hashes)


def test_bad_words_are_spelled_as_they_stand_and_after_a_space(inputs):
    params = SamplingParams(bad_words=("world", "Hello", "q"), n=2)

    request = inputs.process("r", [1], params).core_request

    words = request.sampling_params.bad_words_token_ids
    assert tuple(inputs.tokenizer.encode("world")) in words
    assert {inputs.tokenizer.decode(word) for word in words} <= {
        "world",
        " world",
        "Hello",
        " Hello",
        "q",
        " q",
    }
    spaced = inputs.tokenizer.encode(" world")
    assert (tuple(spaced) in words) is (len(spaced) == len(inputs.tokenizer.encode("world")))
    assert request.sampling_params.n == 2


def test_ids_beyond_the_tokenizer_are_padding_and_the_models_end_tokens_are_not(inputs):
    def limit(vocab_size, eos_token_ids):
        processor = InputProcessor(
            inputs.tokenizer, eos_token_ids=eos_token_ids, max_model_len=32, vocab_size=vocab_size
        )
        return processor.process("r", [1], SamplingParams()).core_request.vocab_limit

    size = inputs.tokenizer.vocab_size
    assert limit(size, [2]) is None
    assert limit(size + 50, [2]) == size
    assert limit(size + 50, [2, size + 9]) == size + 10
