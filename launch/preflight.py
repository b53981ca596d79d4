"""What can be known to be wrong before the first process starts.

Called by: cli.py in the supervisor, after the tree is built and the model's folder is known. Each failure is a
ConfigError, one sentence that says what to change. Imports no torch.
"""

import stat
from dataclasses import replace
from pathlib import Path

from ..shm.errors import ConfigError
from ..workers.config import DeviceType, LoadFormat
from ..workers.gguf_file import is_gguf
from ..workers.transformer_config import read_transformer_config
from .config import LaunchConfig, ServerConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
MAX_KEY_BYTES = 4096
MAX_SHOWN_CHARACTERS = 200


def resolve_device(config: LaunchConfig, num_gpus: int) -> LaunchConfig:
    """Turn device "auto" into CUDA when the host has a GPU, else CPU."""
    parallel = config.parallel
    if parallel.device is DeviceType.AUTO:
        parallel = replace(parallel, device=DeviceType.CUDA if num_gpus else DeviceType.CPU)
    return replace(config, parallel=parallel)


def check_model(config: LaunchConfig) -> None:
    """Check the model's folder or GGUF file against the tree: family, files, heads for every rank, length.

    Raises ConfigError.
    """
    folder = Path(config.model.path)
    model = read_transformer_config(folder)
    tp = config.parallel.tensor_parallel_size
    if tp > model.num_attention_heads:
        problem = f"{tp} is more than the model's {model.num_attention_heads} attention heads"
        raise ConfigError("parallel.tensor_parallel_size", problem)
    longest = config.model.max_model_len
    if longest is not None and longest > model.max_position_embeddings:
        problem = (
            f"{longest} is more than the {model.max_position_embeddings} positions the model was trained for"
        )
        raise ConfigError("model.max_model_len", problem)
    if is_gguf(folder):
        return
    if config.model.load_format is LoadFormat.AUTO and not any(folder.glob("*.safetensors")):
        raise ConfigError("model", f"{folder} holds no weights (*.safetensors)")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError("model", f"{folder} holds no tokenizer ({TOKENIZER_FILES[0]})")


def read_api_key(config: ServerConfig) -> str | None:
    """Read the key that clients must send; None when none is asked for.

    Raises ConfigError (server.api_key_file) when the file cannot be read or its first line is empty.
    """
    return _read_key("server.api_key_file", config.api_key_file)


def read_admin_key(config: ServerConfig) -> str | None:
    """Read the key that administrators must send; None: nobody is let in. Raises ConfigError."""
    return _read_key("server.admin_key_file", config.admin_key_file)


def _read_key(name: str, path: str | None) -> str | None:
    if path is None:
        return None
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            key = file.readline(MAX_KEY_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(name, f"cannot read {path}: {error}") from None
    if not key:
        raise ConfigError(name, f"the first line of {path} is empty")
    return key


def check_other_weights(config: LaunchConfig, path: str) -> None:
    """Check that replicas of this cluster could serve the weights at `path` in place of theirs.

    The front end goes on with its tokenizer and its template, so both must have the same vocabulary. Raises
    ConfigError.
    """
    old, new = Path(config.model.path), Path(path)
    try:
        mode = new.stat().st_mode
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            raise ConfigError("path", f"{path} is neither a folder nor a file")
        check_model(replace(config, model=replace(config.model, path=path)))
        before, after = read_transformer_config(old), read_transformer_config(new)
        files = [folder / TOKENIZER_FILES[0] for folder in (old, new)]
        is_other = all(file.is_file() for file in files) and files[0].read_bytes() != files[1].read_bytes()
    except FileNotFoundError:
        raise ConfigError("path", f"there is no {path}") from None
    # Whatever stands there, and also what no path can be: whoever asks must not fail with it.
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("path", f"cannot read {path[:MAX_SHOWN_CHARACTERS]}: {error!s:.200}") from None
    if before.vocab_size != after.vocab_size:
        raise ConfigError("path", f"has a vocabulary of {after.vocab_size}, not {before.vocab_size}")
    if is_other:
        raise ConfigError("path", f"{path} has another tokenizer than the one that is served")
