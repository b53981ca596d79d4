"""LLM and AsyncLLM on a real, tiny model: the tokens are those of transformers, whatever the scheduler does."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys

import msgspec
import pytest

from phalanx import LLM, AsyncLLM, SamplingParams
from phalanx.engine.errors import InvalidRequestError
from phalanx.engine.llm import _suit_scheduler
from phalanx.engine.messages import FinishReason
from phalanx.shm.errors import ConfigError
from phalanx.workers.sampling_params import StructuredOutputs
from support.engine import make_engine_config, make_report
from support.tiny_models import write_tiny_llama

PROMPTS = [[(7 * i + j * j) % 380 + 3 for j in range(3 + 5 * i)] for i in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(model):
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        for _ in range(GREEDY.max_tokens):
            with torch.no_grad():
                last = reference(ids).logits[:, -1]
            ids = torch.cat([ids, last.argmax(-1, keepdim=True)], dim=1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, device="cpu", num_blocks=64, num_threads=1) as llm:
        yield llm


def token_ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_without_a_tokenizer_the_tokens_are_the_same_and_text_is_refused(model, expected):
    with LLM(model, device="cpu", num_blocks=64, num_threads=1, skip_tokenizer_init=True) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        with pytest.raises(ConfigError, match="must be token ids"):
            llm.generate("text", GREEDY)

    assert token_ids(outputs) == expected
    assert {output.outputs[0].text for output in outputs} == {""}


def test_greedy_outputs_are_those_of_transformers_in_the_order_of_the_prompts(llm, expected):
    outputs = llm.generate(PROMPTS, GREEDY)

    assert token_ids(outputs) == expected
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert all(output.outputs[0].finish_reason is FinishReason.LENGTH for output in outputs)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4, "num_blocks": 16},
        {"block_size": 1, "num_blocks": 50, "max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"enable_prefix_caching": False, "max_num_seqs": 1, "max_num_waiting": 2},
    ],
)
def test_small_caches_chunks_and_queues_change_nothing(model, expected, options):
    with LLM(model, device="cpu", num_threads=1, **{"num_blocks": 32, **options}) as llm:
        assert token_ids(llm.generate(PROMPTS, GREEDY)) == expected
        again = llm.generate(PROMPTS[5], GREEDY)

    assert token_ids(again) == [expected[5]]
    if options.get("enable_prefix_caching", True):
        assert again[0].num_cached_tokens > 0


def test_a_paced_batch_makes_the_same_tokens_in_the_order_of_the_prompts(model, expected):
    lengths = [2, 12, 1, 7, 12, 3]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    with LLM(model, device="cpu", num_blocks=64, num_threads=1, paced_step_tokens=8) as llm:
        made = token_ids(llm.generate(PROMPTS, params))

    assert made == [tokens[:length] for tokens, length in zip(expected, lengths, strict=True)]


@pytest.mark.parametrize(
    ("device", "weight_bytes", "asked", "paced"),
    [
        ("cuda:0", 16_000_000_000, None, 512),
        ("cuda:0", 16_000_000_000, 100, 100),
        ("cuda:0", 1_200_000_000, None, None),
        ("cpu", 16_000_000_000, None, None),
    ],
)
def test_only_large_models_on_gpus_are_paced_unasked(device, weight_bytes, asked, paced):
    config = make_engine_config() if asked is None else make_engine_config(paced_step_tokens=asked)
    report = make_report()
    rank = msgspec.structs.replace(report.ranks[0], device=device, weight_bytes=weight_bytes)

    scheduler = _suit_scheduler(config, msgspec.structs.replace(report, ranks=[rank]))

    assert scheduler.paced_step_tokens == paced
    assert scheduler.max_steps_in_flight == (1 if device == "cpu" else 2)


def test_equal_prompts_of_one_step_share_blocks_and_make_equal_tokens(model, expected):
    with LLM(model, device="cpu", num_blocks=32, block_size=4, num_threads=1) as llm:
        outputs = llm.generate([PROMPTS[5]] * 4, GREEDY)

    assert token_ids(outputs) == [expected[5]] * 4
    assert [output.num_cached_tokens for output in outputs] == [0, 24, 24, 24]


def test_a_sampled_output_does_not_depend_on_its_neighbours(llm):
    params = [SamplingParams(seed=5, max_tokens=8, ignore_eos=True)] * 3
    alone = token_ids([llm.generate(prompt, params[0])[0] for prompt in PROMPTS[:3]])

    assert token_ids(llm.generate(PROMPTS[:3], params)) == alone


def test_the_best_samples_are_those_of_all_with_the_highest_mean_logprob(llm):
    params = {"temperature": 1.5, "seed": 5, "max_tokens": 12}
    (every,) = llm.generate([PROMPTS[2]], SamplingParams(n=5, logprobs=0, **params))
    (best,) = llm.generate([PROMPTS[2]], SamplingParams(n=2, best_of=5, **params))
    (told,) = llm.generate([PROMPTS[2]], SamplingParams(n=2, best_of=5, logprobs=1, **params))

    def mean_logprob(sample):
        return sample.cumulative_logprob / len(sample.token_ids)

    ranked = sorted(every.outputs, key=mean_logprob, reverse=True)
    assert [one.token_ids for one in best.outputs] == [one.token_ids for one in ranked[:2]]
    assert [one.index for one in best.outputs] == [0, 1]
    assert all(one.logprobs is None and one.cumulative_logprob is None for one in best.outputs)
    assert [len(one.logprobs) for one in told.outputs] == [len(one.token_ids) for one in best.outputs]
    assert best.num_output_tokens == sum(len(one.token_ids) for one in every.outputs)


def test_a_stop_string_cuts_the_text_and_the_engine_goes_on(llm):
    whole = llm.generate("The license", SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))[0]
    text = whole.outputs[0].text
    stop = text[5:8]

    stopped = llm.generate(
        "The license", SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=(stop,))
    )[0]

    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].stop_reason == stop
    assert llm.generate("The license", SamplingParams(max_tokens=1))[0].finished


def test_a_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "Hello"}]

    one = llm.chat(messages, GREEDY)
    many = llm.chat([messages, messages], GREEDY)

    assert token_ids(many) == token_ids(one) * 2
    assert "Hello" in llm.tokenizer.decode(one[0].prompt_token_ids)


def test_a_wrong_prompt_among_many_computes_nothing(llm):
    with pytest.raises(InvalidRequestError):
        llm.generate([[1, 2], [99999]], GREEDY)
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate([1, 2], [GREEDY, GREEDY])

    assert llm.generate([], GREEDY) == []
    assert llm.generate([1, 2], GREEDY)[0].finished


def test_an_interrupt_ends_the_call_and_the_next_one_goes_on(llm, expected, monkeypatch):
    get_outputs = llm._client.get_outputs
    calls = itertools.count(1)

    def interrupted_get_outputs():
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return get_outputs()

    monkeypatch.setattr(llm._client, "get_outputs", interrupted_get_outputs)
    # A shell has its background jobs ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=400, ignore_eos=True))
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()

    assert next(calls) == 4
    assert llm._client._core.num_unfinished_requests == 0
    assert token_ids(llm.generate(PROMPTS, GREEDY)) == expected


def test_two_ranks_make_the_tokens_of_one(model, expected):
    with LLM(model, tensor_parallel_size=2, device="cpu", num_blocks=64, num_threads=1) as llm:
        assert token_ids(llm.generate(PROMPTS, GREEDY)) == expected
        assert len(llm.report.ranks) == 2


def test_streams_of_a_launched_engine_make_the_same_tokens(model, expected):
    async def collect(llm, prompt):
        return [
            token_id
            async for output in llm.generate(prompt, GREEDY)
            for token_id in output.outputs[0].token_ids
        ]

    async def scenario():
        async with await AsyncLLM.launch(model, device="cpu", num_blocks=64, num_threads=1) as llm:
            return await asyncio.gather(*[collect(llm, prompt) for prompt in PROMPTS])

    assert asyncio.run(scenario()) == expected


def test_a_plain_script_without_main_guard_works_with_several_ranks(model, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from phalanx import LLM, SamplingParams\n"
        f"llm = LLM({model!r}, tensor_parallel_size=2, device='cpu', num_blocks=64, num_threads=1)\n"
        "print(len(llm.generate(['Hello', 'world'], SamplingParams(max_tokens=3, ignore_eos=True))))\n"
        "llm.close()\n"
    )

    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "2\n"


MIXED = [
    SamplingParams(
        temperature=0.9, seed=1, max_tokens=12, ignore_eos=True, frequency_penalty=0.9, logprobs=1
    ),
    SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, repetition_penalty=1.4, presence_penalty=1.0
    ),
    SamplingParams(
        temperature=1.1,
        seed=2,
        max_tokens=12,
        ignore_eos=True,
        bad_words_token_ids=((9,), (10, 11)),
        top_k=30,
    ),
    SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, max_tokens=12, min_p=0.05, top_p=0.8, min_tokens=12),
    SamplingParams(
        temperature=1.0, seed=4, max_tokens=12, ignore_eos=True, allowed_token_ids=tuple(range(40, 60))
    ),
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 1, "num_blocks": 60, "max_num_batched_tokens": 7, "max_num_seqs": 3},
        # Too few blocks for all: requests are preempted with output, and their counts are made anew.
        {"block_size": 4, "num_blocks": 14},
    ],
)
def test_what_a_request_says_depends_on_itself_alone(llm, model, options):
    alone = [llm.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, MIXED, strict=True)]
    with LLM(model, device="cpu", num_threads=1, **{"num_blocks": 64, **options}) as other:
        together = other.generate(PROMPTS, MIXED)

    for index, (first, second) in enumerate(zip(alone, together, strict=True)):
        if MIXED[index].seed is not None or MIXED[index].is_greedy:
            assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert set(together[5].outputs[0].token_ids) <= set(range(40, 60))
    assert 9 not in together[2].outputs[0].token_ids


def test_a_grammar_that_cannot_go_on_ends_its_request_and_says_why(model):
    form = StructuredOutputs(choice=("yes",))

    # One of its own: the threads that compile grammars end with it.
    with LLM(model, device="cpu", num_blocks=16, num_threads=1) as llm:
        with pytest.raises(
            InvalidRequestError, match=r"allowed_token_ids: the grammar of structured_outputs"
        ):
            llm.generate([5, 6], SamplingParams(structured_outputs=form, allowed_token_ids=(0,)))
        (x,) = llm.tokenizer.encode("X", add_special_tokens=False)
        for spec, problem in (
            ({"choice": ("XX",)}, "stop_token_ids"),
            ({"grammar": "start: " + " | ".join(f'"a{i}"' for i in range(3000))}, "3001 items"),
        ):
            params = SamplingParams(structured_outputs=StructuredOutputs(**spec), stop_token_ids=(x,))
            with pytest.raises(InvalidRequestError, match=f"structured_outputs: .*{problem}"):
                llm.generate([5, 6], params)

        assert llm.generate([5, 6], SamplingParams(structured_outputs=form))[0].outputs[0].text == "yes"
