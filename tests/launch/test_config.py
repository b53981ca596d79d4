"""The tree of settings: sources, types, names and origins."""

from pathlib import Path

import pytest

from phalanx.launch.config import (
    LaunchConfig,
    Override,
    load_config,
    parse_assignment,
    show_config,
)
from phalanx.shm.errors import ConfigError
from phalanx.workers.config import DeviceType

CONFIGS = Path(__file__).parents[2] / "configs"


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def load(*assignments: str) -> LaunchConfig:
    return load_config(None, [parse_assignment(text) for text in assignments]).config


def test_defaults_stand_when_nothing_is_said() -> None:
    config = load_config(None).config

    assert config.server.port == 8000
    assert config.server.host == "127.0.0.1"
    assert config.parallel.tensor_parallel_size == 1
    assert config.engine.scheduler is config.scheduler


@pytest.mark.parametrize("name", ["kv_events_address", "kv_events_replay_address"])
def test_replicas_do_not_share_the_address_of_their_events(name: str) -> None:
    settings = ["scheduler.kv_events=true", "scheduler.kv_events_address=tcp://*:55{dp_rank}0"]
    shared = f"scheduler.{name}=ipc:///tmp/events"

    assert getattr(load(*settings, shared).scheduler, name) == "ipc:///tmp/events"
    with pytest.raises(ConfigError, match=rf"scheduler\.{name}: .*dp_rank"):
        load(*settings, shared, "cluster.data_parallel_size=2")
    with pytest.raises(ConfigError, match=rf"scheduler\.{name}: .*dp_rank"):
        load(*settings, shared).check_replicas(2)


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, "server:\n  port: 9000\n  host: 0.0.0.0\n")

    resolved = load_config(path, [Override(name="server.port", value=9001, origin="--port")])

    assert (resolved.config.server.port, resolved.config.server.host) == (9001, "0.0.0.0")
    assert resolved.origins["server.port"] == "--port"
    assert resolved.origins["server.host"] == "settings.yaml"
    assert resolved.origins["cache.block_size"] == "default"


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("cache.block_size=32", "cache.block_size", 32),
        ("server.served_model_name=a=b", "server.served_model_name", "a=b"),
        ("cache.num_blocks=null", "cache.num_blocks", None),
        ("cache.enable_prefix_caching=false", "cache.enable_prefix_caching", False),
    ],
)
def test_an_assignment_holds_a_yaml_value(text: str, name: str, value: object) -> None:
    override = parse_assignment(text)

    assert (override.name, override.value) == (name, value)


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("cach.block_size=1", "cach.block_size", "known are model, cache"),
        ("cache.blocksize=1", "cache.blocksize", "cache.block_size"),
        ("cache=1", "cache", "known are cache.block_size"),
        ("cache.block_size=true", "cache.block_size", "must be int, not True"),
        ("cache.block_size='16'", "cache.block_size", "must be int, not '16'"),
        ("cache.block_size=1.5", "cache.block_size", "must be int"),
        ("cache.block_size=null", "cache.block_size", "must be int"),
        ("cache.block_size=24", "cache.block_size", "power of two"),
        ("parallel.device=tpu", "parallel.device", "auto, cpu, cuda"),
        ("server.port=70000", "server.port", "65535"),
        ("server.access_log=1", "server.access_log", "must be bool"),
        ("model.path=null", "model.path", "must not be null"),
        ("cache.block_size=[", "cache.block_size", "cannot read"),
        ("cache.block_size", "--set", "section.field=value"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_its_field(text: str, field: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)

    assert caught.value.field == field
    assert words in caught.value.problem


def test_an_integer_is_good_enough_where_a_float_is_wanted() -> None:
    assert load("executor.step_timeout_s=7").executor.step_timeout_s == 7.0


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("caches:\n  a: 1\n", "caches", "is not a section"),
        ("cache:\n  a: 1\n", "cache.a", "is not a setting"),
        ("cache: 3\n", "cache", "must hold fields"),
        ("- 1\n", "--config", "must hold sections"),
        ("cache: {\n", "--config", "is not YAML"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_its_place(
    tmp_path: Path, text: str, field: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))

    assert caught.value.field == field
    assert words in caught.value.problem


@pytest.mark.parametrize("text", ["", "cache:\n", "# nothing\n"])
def test_an_empty_file_changes_nothing(tmp_path: Path, text: str) -> None:
    assert load_config(write(tmp_path, text)).config == load_config(None).config


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "absent.yaml")


def test_what_is_shown_can_be_read_back_and_names_origins(tmp_path: Path) -> None:
    resolved = load_config(
        write(tmp_path, "parallel:\n  device: cpu\nserver:\n  served_model_name: 'a: b'\n")
    )

    shown = show_config(resolved)

    assert "device: cpu                                # settings.yaml" in shown
    assert load_config(write(tmp_path, shown)).config == resolved.config


def test_on_a_gpu_other_defaults_stand_where_nobody_has_said_anything() -> None:
    resolved = load_config(None, [parse_assignment("cache.block_size=16")], num_gpus=1)

    assert resolved.config.cache.block_size == 16
    assert resolved.config.scheduler.max_num_batched_tokens == 16640
    assert resolved.origins["cache.block_size"] == "--set"
    assert resolved.origins["scheduler.max_num_batched_tokens"] == "default on a GPU"


@pytest.mark.parametrize(
    ("device", "num_gpus", "block_size"),
    [("auto", 0, 16), ("auto", 8, 64), ("cpu", 8, 16), ("cuda", 0, 64)],
)
def test_the_device_that_is_meant_decides_on_its_defaults(
    device: str, num_gpus: int, block_size: int
) -> None:
    resolved = load_config(None, [parse_assignment(f"parallel.device={device}")], num_gpus=num_gpus)

    assert resolved.config.cache.block_size == block_size


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_preset_loads(path: Path) -> None:
    device = load_config(path).config.parallel.device
    assert device is (DeviceType.CPU if "cpu" in path.stem else DeviceType.AUTO)
