"""What a checkpoint says of itself: config.json and generation_config.json as one frozen value.

Called by: the command line (checks before anything starts), the front end (context length, end tokens) and
the workers (shapes). Knows both spellings that transformers 4 and 5 write. Imports no torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..shm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Shapes and constants of one checkpoint.

    architecture:  as in config.json ("LlamaForCausalLM")
    eos_token_ids: all tokens that end a sequence: config.json's and generation_config.json's
    rope_scaling:  the checkpoint's own dict, keys as transformers 5 names them; None: plain rotary embedding
    dtype:         of the checkpoint ("bfloat16")
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str


def read_transformer_config(path: str | Path) -> TransformerConfig:
    """Read the folder of a checkpoint.

    Raises ConfigError (field "model") when the folder, its config.json or a needed field is missing or wrong.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError("model", f"{folder} is not a folder")
    raw = _read_json(folder / "config.json")
    if raw is None:
        raise ConfigError(
            "model", f"{folder} holds no config.json, so it is not a model in Hugging Face's layout"
        )
    generation = _read_json(folder / "generation_config.json") or {}
    try:
        return _parse(raw, generation)
    except KeyError as error:
        raise ConfigError("model", f"{folder}/config.json lacks the field {error.args[0]!r}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError("model", f"{folder}/config.json: {error}") from None


def _parse(raw: dict[str, Any], generation: dict[str, Any]) -> TransformerConfig:
    architectures = raw.get("architectures") or ["(none named)"]
    heads = int(raw["num_attention_heads"])
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {k: v for k, v in rope.items() if k != "rope_theta"} or None
    if scaling is not None and "type" in scaling:
        scaling = {"rope_type": scaling["type"], **{k: v for k, v in scaling.items() if k != "type"}}
    if scaling is not None and scaling.get("rope_type", "default") == "default":
        scaling = None
    return TransformerConfig(
        architecture=str(architectures[0]),
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_hidden_layers=int(raw["num_hidden_layers"]),
        num_attention_heads=heads,
        num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
        max_position_embeddings=int(raw["max_position_embeddings"]),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=scaling,
        hidden_act=str(raw.get("hidden_act", "silu")),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_token_ids(raw.get("eos_token_id"), generation.get("eos_token_id")),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _token_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    """Join ids that may each be absent, one number or a list, without repeats, in order."""
    found: dict[int, None] = {}
    for value in values:
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                found[int(token_id)] = None
    return tuple(found)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError("model", f"cannot read {path}: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError("model", f"{path} does not hold a JSON object")
    return loaded
