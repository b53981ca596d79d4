"""Log-probabilities from the model to the user: those of transformers, over chunks, prefix hits and preemption."""

import json

import numpy as np
import pytest

from phalanx import LLM, SamplingParams
from phalanx.cluster.replay import ReplayLog
from phalanx.engine.errors import InvalidRequestError
from phalanx.engine.input_processor import ProcessedRequest
from phalanx.engine.logprobs import LogprobReader
from phalanx.engine.messages import EngineCoreOutput, FinishReason
from phalanx.engine.output_processor import OutputProcessor
from phalanx.engine.outputs import OutputKind
from phalanx.engine.token_text import TokenTexts
from phalanx.engine.tokenizer import load_tokenizer
from phalanx.workers.logprobs import pack_table
from phalanx.workers.messages import LogprobTable
from support.engine import make_request
from support.step_outputs import pack
from support.tiny_models import write_tiny_llama
from support.tokenizers import build_byte_level, build_metaspace

PROMPTS = [[(11 * i + j * j) % 380 + 3 for j in range(2 + 13 * i)] for i in range(4)]
ASKING = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def reference(model):
    """Log-probabilities of all positions of a sequence, as transformers computes them in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def compute(token_ids):
        with torch.no_grad():
            return torch.log_softmax(network(torch.tensor([token_ids])).logits[0], dim=-1).numpy()

    return compute


def check(output, reference, *, num_top=3, num_prompt_top=2):
    """Every number of one output is that of the reference, and they stand in the right order."""
    completion = output.outputs[0]
    prompt = output.prompt_token_ids
    expected = reference([*prompt, *completion.token_ids])
    assert len(completion.logprobs) == len(completion.token_ids)
    for at, (token_id, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        check_position(found, token_id, expected[len(prompt) - 1 + at], num_top)
    total = sum(found[t].logprob for t, found in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    if num_prompt_top is None:
        assert output.prompt_logprobs is None
        return
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for at in range(1, len(prompt)):
        check_position(output.prompt_logprobs[at], prompt[at], expected[at - 1], num_prompt_top)


def check_position(found, token_id, expected, num_top):
    assert next(iter(found)) == token_id
    assert len(found) in (num_top, num_top + 1)
    assert found[token_id].rank == 1 + int((expected > expected[token_id] + 1e-4).sum())
    for other, entry in found.items():
        assert entry.logprob == pytest.approx(float(expected[other]), abs=1e-4)
    others = sorted(entry.logprob for entry in found.values())[-num_top:] if num_top else []
    assert others == pytest.approx(np.sort(expected)[len(expected) - num_top :].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 4, "max_num_batched_tokens": 7, "max_num_seqs": 3},
        # Room for two of four: the others are preempted, also within their prompts.
        {"block_size": 4, "num_blocks": 22, "max_num_batched_tokens": 16, "max_num_seqs": 4},
    ],
)
def test_numbers_are_those_of_transformers(model, reference, options):
    with LLM(model, device="cpu", num_threads=1, **{"num_blocks": 64, **options}) as llm:
        for output in llm.generate(PROMPTS, ASKING):
            check(output, reference)
        # Again, when all prompts are in the prefix cache: those who ask for nothing use it.
        again = llm.generate(PROMPTS[3], ASKING)[0]
        check(again, reference)
        assert again.num_cached_tokens == 0
        plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
        check(llm.generate(PROMPTS[3], plain)[0], reference, num_top=0, num_prompt_top=None)
        assert llm.generate(PROMPTS[3], plain)[0].num_cached_tokens > 0


def test_samples_share_what_is_said_of_the_prompt(model, reference):
    params = SamplingParams(n=3, seed=4, max_tokens=5, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    with LLM(model, device="cpu", num_threads=1, num_blocks=64, block_size=4) as llm:
        (output,) = llm.generate(PROMPTS[2], params)

    assert [
        found[token_id].rank >= 1
        for found, token_id in zip(output.prompt_logprobs[1:], PROMPTS[2][1:], strict=True)
    ]
    for completion in output.outputs:
        expected = reference([*PROMPTS[2], *completion.token_ids])[len(PROMPTS[2]) - 1 :]
        for found, token_id, row in zip(completion.logprobs, completion.token_ids, expected, strict=False):
            assert found[token_id].logprob == pytest.approx(float(row[token_id]), abs=1e-4)


def test_the_server_says_how_much_may_be_asked(model):
    with LLM(model, device="cpu", num_threads=1, num_blocks=16) as llm:
        for field, wanted in (("logprobs", 21), ("prompt_logprobs", 21), ("logprobs", -1)):
            with pytest.raises(InvalidRequestError, match="at most 20") as caught:
                llm.generate([5, 6], SamplingParams(**{field: wanted}))
            assert caught.value.field == field
    with LLM(model, device="cpu", num_threads=1, num_blocks=16, max_logprobs=-1) as llm:
        (output,) = llm.generate([5, 6], SamplingParams(max_tokens=2, logprobs=-1))
    (first, _) = output.outputs[0].logprobs
    assert len(first) == 384
    assert sum(np.exp(entry.logprob) for entry in first.values()) == pytest.approx(1.0, abs=1e-4)


# Without a model


def table(*positions):
    """A table of (token id, value) pairs for each position, the own token first, and its rank."""
    ids = np.array([[token_id for token_id, _ in entries] for entries, _ in positions], dtype=np.int32)
    values = np.array([[value for _, value in entries] for entries, _ in positions], dtype=np.float32)
    return pack_table(ids, values, np.array([rank for _, rank in positions], dtype=np.int32))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return load_tokenizer(build_byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory):
    return load_tokenizer(build_metaspace(tmp_path_factory.mktemp("metaspace")))


TEXT = "Hello world, naïve 🌶🔥 你好 STOP"


@pytest.mark.parametrize("name", ["byte_level", "metaspace"])
def test_texts_and_bytes_of_single_tokens_spell_the_whole(name, request):
    tokenizer = request.getfixturevalue(name)
    texts = TokenTexts(tokenizer)
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    pending, pieces = b"", []
    for token_id in token_ids:
        piece, pending = texts.add(pending, token_id)
        pieces.append(piece)

    assert "".join(pieces).lstrip() == TEXT
    assert b"".join(texts.bytes_of(token_id) for token_id in token_ids).decode().lstrip() == TEXT
    assert pending == b""


def test_two_ids_of_one_text_stay_two(metaspace):
    texts = TokenTexts(metaspace)
    names = {metaspace.id_to_token(token_id): token_id for token_id in range(metaspace.vocab_size)}
    pairs = [(name, names["▁" + name]) for name in names if "▁" + name in names and not name.startswith("<")]

    assert len(pairs) > 3
    for name, spaced in pairs:
        assert metaspace.decode([spaced]) == metaspace.decode([names[name]])
        text = name.replace("▁", " ").encode()
        assert (texts.bytes_of(spaced), texts.bytes_of(names[name])) == (b" " + text, text)


def test_tokens_of_several_spaces_keep_them_all(tmp_path):
    """A decoder drops the first space of what it decodes, and only that one."""
    path = build_metaspace(tmp_path) / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab |= {"▁▁": len(vocab), "▁▁▁▁": len(vocab) + 1}
    content["model"]["merges"] += [["▁", "▁"], ["▁▁", "▁▁"]]
    path.write_text(json.dumps(content))
    texts = TokenTexts(load_tokenizer(tmp_path))

    assert [texts.bytes_of(vocab["▁" * count]) for count in (1, 2, 4)] == [b" ", b" " * 2, b" " * 4]


def test_a_prompt_that_ends_inside_a_character_is_completed_by_the_first_token(byte_level):
    token_ids = byte_level.encode("🦀", add_special_tokens=False)
    assert len(token_ids) > 1
    reader = LogprobReader(TokenTexts(byte_level), token_ids[:-1])

    (position,) = reader.read(table(([(token_ids[-1], -0.5), (byte_level.encode("H")[0], -1.5)], 1)))

    own, other = position.values()
    assert own.text == "🦀"
    assert other.text == "\ufffdH"
    assert own.token_bytes == "🦀".encode()[-len(own.token_bytes) :]


def test_equal_values_have_equal_ranks(byte_level):
    (position,) = LogprobReader(TokenTexts(byte_level), []).read(
        table(([(9, -3.0), (5, -1.0), (6, -1.0), (7, -2.0), (9, -3.0)], 4))
    )

    assert [(token_id, entry.rank) for token_id, entry in position.items()] == [
        (9, 4),
        (5, 1),
        (6, 1),
        (7, 3),
    ]


def sampled(token_id, **fields):
    return EngineCoreOutput(
        request_id="r0",
        new_token_ids=[token_id],
        logprobs=table(([(token_id, -1.0 - token_id), (3, -0.5)], 2)),
        **fields,
    )


@pytest.mark.parametrize("kind", OutputKind)
def test_a_stop_string_leaves_the_numbers_of_all_tokens_up_to_its_own(byte_level, kind):
    processor = OutputProcessor(byte_level)
    request = make_request(stop=("wor",), logprobs=1)
    processor.add_request(ProcessedRequest(core_request=request, prompt=None), kind=kind)
    ids = byte_level.encode("Hello world again")
    positions = [([(token_id, -float(at)), (3, -0.5)], 2) for at, token_id in enumerate(ids)]

    (final,) = processor.process(
        pack([EngineCoreOutput(request_id="r0", new_token_ids=ids, logprobs=table(*positions))])
    ).outputs

    completion = final.outputs[0]
    assert completion.text == "Hello "
    assert 0 < len(completion.token_ids) < len(ids)
    assert [next(iter(position)) for position in completion.logprobs] == completion.token_ids
    assert completion.cumulative_logprob == -sum(range(len(completion.token_ids)))


def test_numbers_go_on_where_a_lost_replica_had_left(byte_level):
    log, processor = ReplayLog(wait_s=5.0), OutputProcessor(byte_level)
    request = make_request(logprobs=1, prompt_logprobs=0)
    processor.add_request(ProcessedRequest(core_request=request, prompt=None))
    log.admit(request, 0)
    prompt = LogprobTable(
        width=1,
        token_ids=np.array(request.prompt_token_ids[1:], dtype="<i4").tobytes(),
        values=np.full(len(request.prompt_token_ids) - 1, -2.0, dtype="<f4").tobytes(),
        ranks=np.ones(len(request.prompt_token_ids) - 1, dtype="<i4").tobytes(),
    )
    processor.process(log.accept(pack([sampled(5, prompt_logprobs=prompt)])))
    processor.process(log.accept(pack([sampled(6)])))

    log.lose(0, 1.0)
    (replayed,) = log.replayable()
    log.replayed("r0", 1)
    last = log.accept(pack([sampled(7, attempt=1, finish_reason=FinishReason.LENGTH)]))
    (final,) = processor.process(last).outputs

    assert replayed.output_token_ids == [5, 6]
    assert final.outputs[0].token_ids == [5, 6, 7]
    assert [next(iter(position)) for position in final.outputs[0].logprobs] == [5, 6, 7]
    assert final.outputs[0].cumulative_logprob == -(6.0 + 7.0 + 8.0)
    assert len(final.prompt_logprobs) == len(request.prompt_token_ids)
