"""The command line: its flags, its help, its exit codes and its sentences."""

import argparse
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.launch import cli
from phalanx.launch.config import LaunchConfig
from phalanx.launch.model_source import resolve_model
from phalanx.shm.exit_codes import ExitCode
from phalanx.workers.config import ModelConfig
from support.tiny_gguf import write_gguf

FLAGS = [
    "--admin-key-file",
    "--api-key-file",
    "--api-servers",
    "--config",
    "--data-parallel-size",
    "--device",
    "--dp",
    "--drain-timeout",
    "--dry-run",
    "--dtype",
    "--gpu-memory-utilization",
    "--help",
    "--host",
    "--max-model-len",
    "--port",
    "--routing-policy",
    "--served-model-name",
    "--set",
    "--tensor-parallel-size",
    "--tp",
    "--version",
    "-h",
]
HELP = """\
usage: cluster-launch [MODEL] [options]
       cluster-launch config show|check FILE

Serve a large language model on many devices, with the OpenAI API.

positional arguments:
  MODEL                 folder or hub name; none: a small model

options:
  -h, --help            show this help message and exit

parallelism:
  --tp N, --tensor-parallel-size N
                        devices that share one replica (1)
  --dp N, --data-parallel-size N
                        replicas that share the requests (1)
  --routing-policy NAME
                        prefix_aware, kv_aware, least_loaded, power_of_two or round_robin
                        (prefix_aware)
  --device NAME         auto, cpu or cuda (auto)

model:
  --dtype NAME          auto, float32, bfloat16 or float16 (auto)
  --max-model-len N     longest prompt plus output, in tokens
  --gpu-memory-utilization PART
                        part of a GPU's memory that one rank may use in all (0.9)

server:
  --api-servers N       processes that share tokenising and streaming (1)
  --host ADDRESS        address to listen on (127.0.0.1)
  --port N              port to listen on; 0: any free one (8000)
  --served-model-name NAME
                        what clients call the model
  --api-key-file FILE   file with the key that clients must send
  --admin-key-file FILE
                        file with the key of administrators (no /admin)
  --drain-timeout S     seconds that running requests get to finish at a stop (30)

settings:
  --config FILE         YAML file of settings
  --set SECTION.FIELD=VALUE
                        one setting; may be repeated
  --dry-run             check everything, show the plan, start nothing
  --version             show program's version number and exit

All other settings: --config and --set; `cluster-launch config show FILE` lists them.
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as left:
        code = int(left.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_flags_are_these() -> None:
    actions = cli.build_parser()._actions

    assert sorted(flag for action in actions for flag in action.option_strings) == FLAGS


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse writes help otherwise from 3.13 on")
def test_the_help_is_this_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    assert cli.build_parser().format_help() == HELP


def test_flags_win_over_set_and_reach_their_fields() -> None:
    line = [
        "m",
        "--tp",
        "2",
        "--dp",
        "3",
        "--port",
        "0",
        "--set",
        "server.port=9",
        "--set",
        "cache.block_size=8",
    ]

    resolved = cli.resolve_arguments(cli.build_parser().parse_args(line))

    assert resolved.config.model.path == "m"
    assert resolved.config.parallel.tensor_parallel_size == 2
    assert resolved.config.cluster.data_parallel_size == 3
    assert (resolved.config.server.port, resolved.origins["server.port"]) == (0, "--port")
    assert (resolved.config.cache.block_size, resolved.origins["cache.block_size"]) == (8, "--set")


def test_every_flag_with_a_field_is_an_argument_of_the_parser() -> None:
    names = set(vars(cli.build_parser().parse_args([])))

    assert set(cli.FIELDS) <= names


def test_a_dry_run_shows_the_plan_and_starts_nothing(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    code, out, _ = run(capsys, model, "--tp", 2, "--dp", 2, "--device", "cpu", "--port", 0, "--dry-run")

    assert code == ExitCode.OK
    assert all(f"dp{dp} tp{tp}" in out for dp in (0, 1) for tp in (0, 1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "5"], "parallel.tensor_parallel_size: 5 is more than the model's 4 attention heads"),
        (["--max-model-len", "129"], "model.max_model_len: 129 is more than the 128 positions"),
        (["--tp", "0"], "parallel.tensor_parallel_size: must be at least 1"),
        (["--set", "cache.nothing=1"], "cache.nothing: is not a setting"),
        (["--config", "absent.yaml"], "--config: cannot read absent.yaml"),
        (["--api-key-file", "absent.key"], "server.api_key_file: cannot read absent.key"),
        (["--host", "not a host"], "server.host: 'not a host' cannot be resolved"),
        (["--tp", "two"], "invalid int value: 'two'"),
        (["--tensor", "2"], "unrecognized arguments: --tensor 2"),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], model: Path, arguments: list[str], words: str
) -> None:
    port = [] if "--host" in arguments else ["--port", "0"]

    code, out, err = run(capsys, model, "--device", "cpu", *port, *arguments)

    (line,) = [line for line in err.splitlines() if "WARNING" not in line]
    assert code == ExitCode.BAD_CONFIG
    assert line.startswith("cluster-launch: ")
    assert words in line
    assert out == ""


def test_more_ranks_than_gpus_is_refused(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "count_gpus", lambda: 0)

    code, _, err = run(capsys, model, "--device", "cuda", "--port", 0)

    assert code == ExitCode.BAD_CONFIG
    assert "GPU" in err


def test_a_port_in_use_is_refused_before_the_model_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        code, _, err = run(capsys, "/no/such/model", "--device", "cpu", "--port", port)

    assert code == ExitCode.BAD_CONFIG
    assert f"server.port: 127.0.0.1:{port} is in use" in err


@pytest.mark.parametrize("content", [None, "{}", "[]", "{"])
def test_a_folder_that_is_no_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    code, _, err = run(capsys, tmp_path, "--device", "cpu", "--port", 0)

    assert code == ExitCode.BAD_CONFIG
    assert "cluster-launch: model: " in err


@pytest.mark.parametrize(
    ("gone", "words"), [("model.safetensors", "no weights"), ("tokenizer.json", "no tokenizer")]
)
def test_a_model_without_weights_or_tokenizer_is_refused(
    capsys: pytest.CaptureFixture[str], model: Path, gone: str, words: str
) -> None:
    (model / gone).unlink()

    code, _, err = run(capsys, model, "--device", "cpu", "--port", 0)

    assert code == ExitCode.BAD_CONFIG
    assert words in err


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "a/b/c", "", "~nobody/model"])
def test_a_mistyped_folder_is_refused_without_asking_the_hub(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, _, err = run(capsys, name, "--device", "cpu", "--port", 0)

    assert code == ExitCode.BAD_CONFIG
    assert "cluster-launch: model: " in err


def test_config_show_and_check_read_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("cache:\n  block_size: 32\n")
    bad.write_text("cache:\n  block_size: 33\n")

    shown, checked, refused = (
        run(capsys, "config", *words) for words in [("show", good), ("check", good), ("check", bad)]
    )

    assert shown[0] == ExitCode.OK
    assert "block_size: 32" in shown[1]
    assert checked[:2] == (ExitCode.OK, f"{good}: ok\n")
    assert refused[0] == ExitCode.BAD_CONFIG
    assert "cache.block_size" in refused[2]


def test_the_module_runs_as_a_program_without_torch() -> None:
    script = (
        "import sys, phalanx.launch.cli as cli\n"
        "code = cli.main(['--set', 'a.b=1'])\n"
        "assert not {'torch', 'transformers', 'fastapi', 'gguf'} & sys.modules.keys()\n"
        "sys.exit(code)"
    )

    as_module = subprocess.run(
        [sys.executable, "-m", "phalanx.launch", "--version"], capture_output=True, text=True
    )
    as_script = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert as_module.returncode == ExitCode.OK
    assert as_module.stdout.startswith("phalanx ")
    assert as_script.returncode == ExitCode.BAD_CONFIG, as_script.stderr
    assert isinstance(cli.build_parser(), argparse.ArgumentParser)


def test_an_unknown_family_is_refused_with_a_list_of_those_that_there_are(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "n_head": 12}
    (model / "config.json").write_text(json.dumps(config))

    code, out, err = run(capsys, model)

    assert (code, out) == (2, "")
    assert "GPT2LMHeadModel is not supported; supported: Gemma3ForCausalLM, " in err
    assert len(err.splitlines()) == 1


def test_a_gguf_file_is_a_model_named_after_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "tiny.Q4_0.gguf")

    path = tmp_path / "tiny.Q4_0.gguf"

    code, _, _ = run(capsys, path, "--tp", 3, "--device", "cpu", "--port", 0, "--dry-run")
    resolved = resolve_model(LaunchConfig(model=ModelConfig(path=str(path))))

    assert code == ExitCode.OK
    assert (resolved.model.path, resolved.server.served_model_name) == (str(path), "tiny.Q4_0")
