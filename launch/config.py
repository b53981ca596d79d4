"""The whole tree of settings: where values come from, what they are called, and where each one stands.

Called by: cli.py builds one tree in the supervisor; runtime.py hands each part its own sections. Sources, later
ones win: *defaults, those of the device, the YAML file, flags and `--set section.field=value`*. This is the only
module that knows all sections; their meaning and their checks live in the folders that own them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import yaml

from ..cluster.config import ClusterConfig
from ..engine.config import EngineConfig, SchedulerConfig
from ..engine.device_defaults import device_defaults
from ..shm.errors import ConfigError
from ..workers.config import CacheConfig, ExecutorConfig, ModelConfig, ParallelConfig

DEFAULT_ORIGIN = "default"
DEVICE_ORIGIN = "default on a GPU"
EMBEDDED_MODEL = ""
"""`model.path` when nobody named a model: the small one that is fetched once and kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The OpenAI-compatible front door."""

    host: str = "127.0.0.1"
    """Address to listen on. The default answers this machine only; 0.0.0.0 answers the network."""
    port: int = 8000
    """TCP port. 0: any free one; the log says which."""
    served_model_name: str | None = None
    """What clients call the model. None: the hub name, or the last part of the folder's path."""
    api_key_file: str | None = None
    """File whose first line is the key that clients must send. None: no key is asked for."""
    admin_key_file: str | None = None
    """File whose first line is the key that administrators must send. None: the /admin routes let nobody in."""
    access_log: bool = False
    """One log line for each request."""
    max_body_bytes: int = 16 << 20
    """Largest request body; a larger one is answered 413."""
    max_prompts: int = 256
    """Prompts in one completions request."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("server.port", f"must be in [0, 65535], not {self.port}")
        if not self.host:
            raise ConfigError("server.host", "must not be empty")
        if self.served_model_name == "":
            raise ConfigError("server.served_model_name", "must not be empty")
        for name in ("max_body_bytes", "max_prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"server.{name}", "must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Every setting of one cluster."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        self.check_replicas(self.cluster.data_parallel_size)

    def check_replicas(self, num_replicas: int) -> None:
        """Raise ConfigError when so many replicas would get in each other's way."""
        if num_replicas == 1:
            return
        for name in ("kv_events_address", "kv_events_replay_address"):
            address = getattr(self.scheduler, name)
            if address is not None and "{dp_rank}" not in address:
                problem = f"{address} is one address for all replicas: it must say {{dp_rank}}"
                raise ConfigError(f"scheduler.{name}", problem)

    @property
    def engine(self) -> EngineConfig:
        """The sections of one replica."""
        return EngineConfig(
            model=self.model,
            cache=self.cache,
            parallel=self.parallel,
            executor=self.executor,
            scheduler=self.scheduler,
        )


SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "parallel": ParallelConfig,
    "executor": ExecutorConfig,
    "scheduler": SchedulerConfig,
    "cluster": ClusterConfig,
    "server": ServerConfig,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One value and who set it ("--tp", "--set", "tiny.yaml")."""

    name: str
    value: object
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The tree, and the origin of every value by its dotted name."""

    config: LaunchConfig
    origins: Mapping[str, str]


def load_config(
    file: Path | None, overrides: Iterable[Override] = (), *, num_gpus: int = 0
) -> ResolvedConfig:
    """Join defaults, the YAML `file` and `overrides`, in this order, and check every value.

    num_gpus: of this host; what nobody has set depends on whether there is one

    Raises ConfigError that names the dotted field, and lists the known ones when it is unknown.
    """
    values: dict[str, Any] = {"model.path": EMBEDDED_MODEL}
    origins = {
        f"{section}.{item.name}": DEFAULT_ORIGIN
        for section, kind in SECTIONS.items()
        for item in fields(kind)
    }
    from_file = read_file(file) if file is not None else []
    for override in [*from_file, *overrides]:
        values[override.name] = _convert(override)
        origins[override.name] = override.origin
    device = values.get("parallel.device", ParallelConfig().device)
    for name, value in device_defaults(device, num_gpus=num_gpus).items():
        if name not in values:
            values[name], origins[name] = value, DEVICE_ORIGIN
    sections = {
        section: kind(
            **{name.partition(".")[2]: v for name, v in values.items() if name.startswith(f"{section}.")}
        )
        for section, kind in SECTIONS.items()
    }
    return ResolvedConfig(config=LaunchConfig(**sections), origins=origins)


def read_file(path: Path) -> list[Override]:
    """Read a YAML file of sections into overrides, in the order of the file."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError("--config", f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return []
    if not isinstance(tree, dict):
        raise ConfigError("--config", f"{path} must hold sections ({', '.join(SECTIONS)})")
    found = []
    for section, entries in tree.items():
        if section not in SECTIONS:
            raise ConfigError(str(section), f"is not a section; known are {', '.join(SECTIONS)}")
        if entries is None:
            continue
        if not isinstance(entries, dict):
            raise ConfigError(section, "must hold fields")
        found += [
            Override(name=f"{section}.{name}", value=value, origin=path.name)
            for name, value in entries.items()
        ]
    return found


def parse_assignment(text: str) -> Override:
    """Read one `section.field=value` of `--set`; the value is YAML ("null", "0.5", "true", "text")."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError("--set", f"needs section.field=value, not {text!r}")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(name, f"cannot read the value {value!r}") from None
    return Override(name=name.strip(), value=parsed, origin="--set")


def show_config(resolved: ResolvedConfig) -> str:
    """Write the tree as YAML, with the origin of each value behind it."""
    lines = []
    for section, kind in SECTIONS.items():
        lines.append(f"{section}:")
        values = getattr(resolved.config, section)
        for item in fields(kind):
            value = msgspec.to_builtins(getattr(values, item.name))
            text = yaml.safe_dump(value, default_flow_style=True).splitlines()[0]
            lines.append(f"  {item.name + ': ' + text:<42} # {resolved.origins[f'{section}.{item.name}']}")
    return "\n".join(lines) + "\n"


def _convert(override: Override) -> Any:
    section, _, name = override.name.partition(".")
    if section not in SECTIONS:
        raise ConfigError(override.name, f"{section!r} is not a section; known are {', '.join(SECTIONS)}")
    kind = SECTIONS[section]
    known = [item.name for item in fields(kind)]
    if name not in known:
        raise ConfigError(
            override.name, f"is not a setting; known are {', '.join(f'{section}.{k}' for k in known)}"
        )
    if override.value is None and any(item.name == name and item.default is MISSING for item in fields(kind)):
        raise ConfigError(override.name, "must not be null")
    hint = get_type_hints(kind)[name]
    try:
        return msgspec.convert(override.value, type=hint, strict=True)
    except msgspec.ValidationError as error:
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            raise ConfigError(
                override.name, f"must be one of {', '.join(hint)}, not {override.value!r}"
            ) from None
        raise ConfigError(override.name, _plain(str(error), override.value)) from None


def _plain(problem: str, value: object) -> str:
    """Turn msgspec's "Expected `int | null`, got `str`" into a sentence that shows the value."""
    expected = re.search(r"Expected `([^`]*)`", problem)
    return (
        f"must be {expected.group(1)}, not {value!r}" if expected else f"{problem[:1].lower()}{problem[1:]}"
    )
