"""cluster-bench routing-real: the real chats are the simulated ones, and both find the same in the caches."""

import json
from pathlib import Path

import pytest

from phalanx.engine.block_hash import extend_block_hashes
from phalanx.launch.bench.cli import main
from phalanx.launch.bench.errors import BenchError
from phalanx.launch.bench.report import Report, ReportWriter
from phalanx.launch.bench.routing import real, real_chats
from phalanx.launch.bench.routing.load import chats, turns
from phalanx.launch.bench.routing.service import ASSUMED
from phalanx.launch.bench.steps import StepFit
from support.launch import TINY_MODEL


def write_service(stem: Path) -> Path:
    """A result of `cluster-bench steps`, with numbers of the order of the tiny model's."""
    fit = StepFit(
        model="tiny-llama",
        device="none",
        dtype="float32",
        cost=real.slow_down(ASSUMED, 0.2).cost,
        capacity_tokens=10_000,
        max_num_batched_tokens=256,
        max_num_seqs=32,
        num_steps=1,
        error=0.0,
    )
    with stem.with_suffix(".log").open("w") as out:
        report = ReportWriter([], stem).finish(benchmark="steps", num_runs=1, tables=[], runs=fit, out=out)
    assert isinstance(report, Report)
    return stem.with_suffix(".json")


def test_prompts_share_as_many_blocks_of_tokens_as_keys_of_the_load() -> None:
    load = chats("chats", 60, 1.0, 5, real.SHORT_CHATS)
    prompts = real_chats.spell(load, 5)
    found = []
    for _, first in load.arrivals:
        for request in turns(first):
            prompt = prompts[request.request_id]
            assert len(prompt.token_ids) == request.num_prompt_tokens
            # Of the last token of an answer no KV is made.
            answer = [prompt.answer_token_id] * (request.num_output_tokens - 1)
            hashes: list[bytes] = []
            extend_block_hashes(hashes, [*prompt.token_ids, *answer], load.block_tokens)
            found.append((request.keys, hashes))

    assert len(found) >= 60
    for keys, hashes in found:
        assert len(keys) == len(hashes)
    pairs = {(key, name) for keys, hashes in found for key, name in zip(keys, hashes, strict=True)}
    assert len({key for key, _ in pairs}) == len({name for _, name in pairs}) == len(pairs)


def test_another_seed_has_other_tokens() -> None:
    spelled = [real_chats.spell(chats("chats", 10, 1.0, seed, real.SHORT_CHATS), seed) for seed in (1, 2)]
    begins = [{tuple(prompt.token_ids[:16]) for prompt in prompts.values()} for prompts in spelled]

    assert not begins[0] & begins[1]


def test_metrics_without_a_series_are_refused() -> None:
    text = 'phalanx_kv_blocks_total{model_name="m",dp_rank="0"} 5.0\n'

    with pytest.raises(BenchError, match="lack a series"):
        real_chats.parse_counts(text)
    assert real_chats.parse_counts("") == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policies", "best"], "--policies: 'best' is none of prefix_aware"),
        (["--rate", "0"], "--rate: must be above 0"),
        (["--think-s", "nan"], "--think-s: must be above 0"),
    ],
)
def test_bad_flags_are_named(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = str(write_service(tmp_path / "steps"))

    assert main(["routing-real", "--service", service, *words, "--", str(TINY_MODEL)]) == 1
    assert said in capsys.readouterr().err


def test_two_real_replicas_find_what_the_simulated_ones_find(tmp_path: Path) -> None:
    service = str(write_service(tmp_path / "steps"))
    words = ["routing-real", "--service", service, "--requests", "24", "--rate", "200", "--seeds", "1,2"]
    words += ["--think-s", "0.05"]
    words += ["--policies", "prefix_aware", "--out", str(tmp_path / "r")]

    code = main([*words, "--", str(TINY_MODEL), "--device", "cpu", "--set", "cache.num_blocks=4000"])

    assert code == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert [(one["data_parallel_size"], one["seed"]) for one in report["runs"]] == [(2, 1), (2, 2)]
    for one in report["runs"]:
        assert one["kv_tokens"] == pytest.approx(4000 * 16, rel=0.01)
        assert min(one["replica_tokens"]) > 0
        assert one["hit_rate"] > 0.4
        assert one["hit_rate"] == pytest.approx(one["simulated_hit_rate"], abs=0.2)
        assert one["slowness"] > 0
