"""What a checkpoint says of itself: config.json and generation_config.json, or GGUF metadata.

Called by: the command line (checks before anything starts), the front end (context length, end tokens) and
the workers (shapes). Knows both spellings that transformers 4 and 5 write. Imports no torch.
"""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from ..shm.errors import ConfigError
from .gguf_checkpoint import GgufCheckpoint
from .gguf_file import is_gguf, open_gguf
from .models.registry import check_architecture

ASSUMED: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"use_sliding_window": False},
    "MistralForCausalLM": {"sliding_window": 4096},
    "Qwen2ForCausalLM": {"use_sliding_window": False},
    "Qwen3ForCausalLM": {"use_sliding_window": False, "head_dim": 128},
    "Gemma3ForCausalLM": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
}
"""What an architecture's config.json means by a field that it leaves out, where that is not zero, false or none."""
ASSUMED_EPSILON = 1e-6
Choice = TypeVar("Choice", bound=StrEnum)


class LayerType(StrEnum):
    """What the queries of a layer see, named as in config.json."""

    FULL = "full_attention"
    """All tokens before them."""
    SLIDING = "sliding_attention"
    """The last `sliding_window` tokens, themselves among them."""


class Activation(StrEnum):
    """What the gate of an MLP goes through, named as in config.json."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


class RopeType(StrEnum):
    """How rotary frequencies are scaled, named as in config.json."""

    DEFAULT = "default"
    """Not at all."""
    LINEAR = "linear"
    """All divided by `factor`."""
    LLAMA3 = "llama3"
    """Slow ones divided by `factor`, fast ones kept."""
    DIVIDED = "divided"
    """Each by its own of the `divisors`. Of GGUF files alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. parameters: what the type takes, named as in config.json"""

    theta: float
    rope_type: RopeType = RopeType.DEFAULT
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Shapes and constants of one checkpoint.

    architecture:            as in config.json ("LlamaForCausalLM")
    rope, local_rope:        of all layers; of the sliding ones when they have their own
    attention_bias:          as config.json says; what it covers is the family's business
    query_pre_attn_scalar:   queries are scaled by its inverse square root; None: the head size's
    final_logit_softcapping: logits are squeezed into this range by tanh; None: left alone
    eos_token_ids:           all tokens that end a sequence: config.json's and generation_config.json's
    layer_types:             one for each layer
    dtype:                   of the checkpoint ("bfloat16")
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
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None = None
    hidden_act: Activation
    attention_bias: bool = False
    mlp_bias: bool = False
    query_pre_attn_scalar: float | None = None
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str

    @property
    def num_layer_weights(self) -> int:
        """Numbers in the matrices of all layers."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        per_layer = heads * self.head_dim + 3 * self.intermediate_size
        return self.num_hidden_layers * self.hidden_size * per_layer

    def window(self, layer: int) -> int | None:
        """Tokens that a query of this layer sees at most, itself among them; None: all."""
        return self.sliding_window if self.layer_types[layer] is LayerType.SLIDING else None


def read_transformer_config(path: str | Path) -> TransformerConfig:
    """Read the folder of a checkpoint, or the metadata of a GGUF file.

    Raises ConfigError (field "model") when it, its config.json or a needed field is missing or wrong, or when the
    architecture is not one of ours.
    """
    path = Path(path)
    if is_gguf(path):
        source, raw, generation = path, GgufCheckpoint(open_gguf(path)).config(), {}
    else:
        source, raw, generation = path / "config.json", *_read_folder(path)
    try:
        return parse_config(raw, generation)
    except KeyError as error:
        raise ConfigError("model", f"{source} lacks the field {error.args[0]!r}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError("model", f"{source}: {error}") from None


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    if not folder.is_dir():
        raise ConfigError("model", f"{folder} is neither a folder nor a GGUF file")
    raw = _read_json(folder / "config.json")
    if raw is None:
        raise ConfigError(
            "model", f"{folder} holds no config.json, so it is not a model in Hugging Face's layout"
        )
    return raw, _read_json(folder / "generation_config.json") or {}


def parse_config(raw: dict[str, Any], generation: dict[str, Any]) -> TransformerConfig:
    """Read config.json's fields, and the end tokens of generation_config.json.

    Raises ConfigError for an architecture that is not supported, KeyError for a field that is missing, TypeError or
    ValueError for a wrong one.
    """
    architecture = str((raw.get("architectures") or ["(none named)"])[0])
    check_architecture(architecture)
    # A model that also sees images keeps the fields of its text part apart.
    text = raw.get("text_config") or {}
    family = "Gemma3ForCausalLM" if architecture == "Gemma3ForConditionalGeneration" else architecture
    given = {
        key: value for key, value in {**raw, **text}.items() if value is not None or key == "sliding_window"
    }
    fields = {**ASSUMED[family], **given}
    for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if fields.get(name):
            raise ValueError(f"{name} is not supported")
    num_layers, num_heads = int(fields["num_hidden_layers"]), int(fields["num_attention_heads"])
    rope, local_rope = _ropes(fields)
    return TransformerConfig(
        architecture=architecture,
        vocab_size=int(fields["vocab_size"]),
        hidden_size=int(fields["hidden_size"]),
        intermediate_size=int(fields["intermediate_size"]),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=int(fields.get("num_key_value_heads") or num_heads),
        head_dim=int(fields.get("head_dim") or int(fields["hidden_size"]) // num_heads),
        max_position_embeddings=int(fields["max_position_embeddings"]),
        rms_norm_eps=float(fields.get("rms_norm_eps", ASSUMED_EPSILON)),
        rope=rope,
        local_rope=local_rope,
        layer_types=_layer_types(fields, num_layers),
        sliding_window=fields.get("sliding_window"),
        hidden_act=_known(Activation, fields.get("hidden_activation") or fields.get("hidden_act") or "silu"),
        attention_bias=bool(fields.get("attention_bias", False)),
        mlp_bias=bool(fields.get("mlp_bias", False)),
        query_pre_attn_scalar=fields.get("query_pre_attn_scalar"),
        final_logit_softcapping=fields.get("final_logit_softcapping"),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        bos_token_id=fields.get("bos_token_id"),
        eos_token_ids=_token_ids(
            fields.get("eos_token_id"), raw.get("eos_token_id"), generation.get("eos_token_id")
        ),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _layer_types(fields: dict[str, Any], num_layers: int) -> tuple[LayerType, ...]:
    """Read the list, or what stood for it before: one of every `sliding_window_pattern` layers is full, or all
    from `max_window_layers` on are sliding.
    """
    if fields.get("layer_types"):
        types = tuple(_known(LayerType, name) for name in fields["layer_types"])
        if len(types) != num_layers:
            raise ValueError(f"layer_types names {len(types)} layers, and num_hidden_layers is {num_layers}")
    elif fields.get("sliding_window") is None or not fields.get("use_sliding_window", True):
        types = (LayerType.FULL,) * num_layers
    elif pattern := fields.get("sliding_window_pattern"):
        types = tuple(
            LayerType.SLIDING if (index + 1) % int(pattern) else LayerType.FULL for index in range(num_layers)
        )
    else:
        first = int(fields.get("max_window_layers") or 0)
        types = tuple(LayerType.SLIDING if index >= first else LayerType.FULL for index in range(num_layers))
    if LayerType.SLIDING in types and not fields.get("sliding_window"):
        raise ValueError("there are sliding layers, and sliding_window is not given")
    return types


def _ropes(fields: dict[str, Any]) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary embedding of all layers, and of the sliding ones when theirs is another.

    transformers 5 writes `rope_parameters`, one dict or one for each type of layer; 4 wrote `rope_theta`,
    `rope_scaling` and `rope_local_base_freq`.
    """
    theta = float(fields.get("rope_theta") or 10_000.0)
    local_theta = fields.get("rope_local_base_freq")
    parameters = fields.get("rope_parameters") or {}
    if LayerType.FULL in parameters:
        local = parameters.get(LayerType.SLIDING)
        return _rope(parameters[LayerType.FULL], theta), local and _rope(local, float(local_theta or theta))
    rope = _rope({**(fields.get("rope_scaling") or {}), **parameters}, theta)
    return rope, None if local_theta is None else RopeConfig(theta=float(local_theta))


def _rope(parameters: dict[str, Any], theta: float) -> RopeConfig:
    names = ("rope_theta", "rope_type", "type")
    return RopeConfig(
        theta=float(parameters.get("rope_theta") or theta),
        rope_type=_known(RopeType, parameters.get("rope_type") or parameters.get("type") or "default"),
        parameters={key: value for key, value in parameters.items() if key not in names},
    )


def _known(kind: type[Choice], name: str) -> Choice:
    """Read one of several words. Raises ValueError, which lists those that there are."""
    try:
        return kind(name)
    except ValueError:
        known = ", ".join(kind)
        raise ValueError(f"{name!r} is not supported where one of these may stand: {known}") from None


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
