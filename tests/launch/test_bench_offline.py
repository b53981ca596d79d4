"""cluster-bench latency and throughput: their workloads, their floors, and both commands on a tiny model."""

import gzip
import json
from pathlib import Path

import pytest

from phalanx.launch.bench.cli import main
from phalanx.launch.bench.errors import BenchError
from phalanx.launch.bench.floor import Ceilings, model_cost, workload_floor
from phalanx.launch.bench.offline_workload import make_workload, shorten
from phalanx.launch.bench.reference import read_reference
from phalanx.workers.transformer_config import parse_config
from support.tiny_models import llama_config

LLAMA_8B = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    {},
)
AIMED_AT = Ceilings(read_bytes_per_s=4.2e12, matmul_flops=790e12)
PEERS = Path(__file__).parents[2] / "launch" / "bench" / "peers"


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    """A folder that holds nothing but config.json: no weights, no tokenizer."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = llama_config() | {"max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_nano_is_the_workload_that_others_measured() -> None:
    nano = make_workload("nano", vocab_size=151_936)

    assert (sum(nano.prompt_lens), nano.num_output_tokens) == (143_618, 137_723)
    assert (len(nano.prompts), nano.temperature, nano.max_len <= 2048) == (256, 0.6, True)


def test_a_workload_is_named_or_a_shape_and_the_same_each_time() -> None:
    batch = make_workload("batch64", vocab_size=32_000)
    assert batch.prompt_lens == [512] * 64
    assert (batch.output_lens, batch.temperature) == ([256] * 64, 0.0)
    assert batch.prompts == make_workload("64x512-256:greedy", vocab_size=151_936).prompts

    filtered = make_workload("64x512-256:filtered", vocab_size=32_000)
    assert (filtered.prompts, filtered.temperature) == (batch.prompts, 0.6)
    assert (filtered.top_k, filtered.top_p, batch.top_k, batch.top_p) == (50, 0.9, 0, 1.0)

    tiny = make_workload("3x5-7", vocab_size=11)
    assert all(0 <= token_id < 11 for prompt in tiny.prompts for token_id in prompt)
    assert shorten(tiny, 4).output_lens == [4] * 3
    for name in ("none", "0x5-7", "3x5-7:beam"):
        with pytest.raises(ValueError, match="nano"):
            make_workload(name, vocab_size=11)


@pytest.mark.parametrize(
    ("name", "expected_s"), [("single", 256 * 3.57e-3), ("batch256", 8.31), ("nano", 10.3)]
)
def test_floors_are_those_computed_by_hand(name: str, expected_s: float) -> None:
    workload = make_workload(name, vocab_size=LLAMA_8B.vocab_size)

    floor = workload_floor(
        model_cost(LLAMA_8B, "bfloat16"), AIMED_AT, workload.prompt_lens, workload.output_lens
    )

    assert floor.total_s == pytest.approx(expected_s, rel=0.02)


def test_a_reference_is_found_by_model_and_workload_and_read_strictly(tmp_path: Path) -> None:
    (path,) = PEERS.glob("vllm-*.json")
    reference = read_reference(path)
    found = reference.find("Qwen3-0.6B", "single")
    assert found is not None
    assert (found.wall_s, reference.find("Qwen3-0.6B", "unknown")) == (0.433, None)

    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"program": "x"}', encoding="utf-8")
    with pytest.raises(BenchError, match=r"wrong\.json"):
        read_reference(wrong)


def test_latency_times_a_model_that_is_only_a_config_and_traces_it(tmp_path: Path, config_only: Path) -> None:
    reference = tmp_path / "other.json"
    runs = [{"model": "tiny", "workload": "1x9-12", "wall_s": 5.0}]
    reference.write_text(
        json.dumps({"program": "other 1", "source": "made up", "runs": runs}), encoding="utf-8"
    )

    assert main([
        "latency", "--model", str(config_only), "--weights", "dummy", "--workload", "1x9-12", "--repetitions", "2",
        "--device", "cpu", "--set", "num_blocks=32", "--reference", str(reference), "--trace", str(tmp_path / "t"),
        "--out", str(tmp_path / "latency"),
    ]) == 0  # fmt: skip

    report = json.loads((tmp_path / "latency.json").read_text(encoding="utf-8"))
    measured = report["runs"]
    assert [run["num_output_tokens"] for run in measured["runs"]] == [12, 12]
    assert all(run["wall_s"] > 0 for run in measured["runs"])
    assert measured["ceilings"]["read_bytes_per_s"] > 0
    assert measured["start"]["process_s"] >= measured["start"]["llm_s"] > 0
    (row,) = report["tables"][0]["rows"]
    assert float(row[-1].rstrip("×")) == pytest.approx(
        5.0 / ((measured["runs"][0]["wall_s"] + measured["runs"][1]["wall_s"]) / 2), abs=0.01
    )
    events = json.loads(gzip.decompress((tmp_path / "t-1x9-12.json.gz").read_bytes()))["traceEvents"]
    assert any("aten::" in event.get("name", "") for event in events)


def test_throughput_runs_its_workloads_by_turns(tmp_path: Path, config_only: Path) -> None:
    assert main([
        "throughput", "--model", str(config_only), "--weights", "dummy", "--workload", "6x8-5:greedy",
        "--workload", "4x20-3", "--repetitions", "2", "--device", "cpu", "--out", str(tmp_path / "throughput"),
    ]) == 0  # fmt: skip

    report = json.loads((tmp_path / "throughput.json").read_text(encoding="utf-8"))
    assert [run["workload"] for run in report["runs"]["runs"]] == ["6x8-5:greedy", "4x20-3"] * 2
    assert [row[0] for row in report["tables"][0]["rows"]] == ["6x8-5:greedy", "4x20-3"]
    assert report["runs"]["floors"] == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "most"], "--workload"),
        (["--workload", "1x100-100"], "needs 200 tokens of context"),
        (["--workload", "1x4-4", "--set", "num_blocks"], "NAME=VALUE"),
        (["--workload", "1x4-4", "--set", "nothing=1"], "is not a setting"),
    ],
)
def test_a_wrong_flag_is_named(
    capsys: pytest.CaptureFixture[str], config_only: Path, words: list[str], message: str
) -> None:
    assert (
        main(["latency", "--model", str(config_only), "--weights", "dummy", "--device", "cpu", *words]) == 2
    )
    assert message in capsys.readouterr().err
