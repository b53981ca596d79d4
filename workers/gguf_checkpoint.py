"""A GGUF file as a checkpoint: its fields and tensors under the names of Hugging Face.

Called by: transformer_config.py in every process; the weight loader in the workers; the conversion of the default
model. No torch. What llama.cpp's converters did to the tensors is undone here: llama's rows of queries and keys
alternate between the two rotary halves; Gemma's norms hold one plus the weight.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..shm.errors import ConfigError
from .gguf_file import GgufFile
from .gguf_quants import GgufType
from .span import Span

ARCHITECTURES = {
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""general.architecture: config.json's architecture and model_type."""
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_LAYER_NAMES = {
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies: how llama.cpp keeps Llama 3's scaling."""
GEMMA_LOCAL_BASE, GEMMA_PATTERN, GEMMA_27B_LAYERS = 10_000.0, 6, 62
"""Constants that older Gemma 3 files leave to the reader."""


class GgufCheckpoint:
    """Raises ConfigError (field "model") for a file of an architecture or with tensors that are not known."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._architecture = str(file.metadata.get("general.architecture"))
        if self._architecture not in ARCHITECTURES:
            raise ConfigError(
                "model",
                f"GGUF files of the architecture {self._architecture} are not supported; supported: "
                f"{', '.join(sorted(ARCHITECTURES))}",
            )
        self._names = {self._translate(name): name for name in file.tensors if name != ROPE_FACTORS}

    @property
    def names(self) -> list[str]:
        """Tensors, named as in Hugging Face's checkpoints."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, as Hugging Face's checkpoints hold it."""
        return self._file.tensors[self._names[name]].shape

    def read(self, name: str, *, dim: int | None = None, span: Span | None = None) -> NDArray[np.float32]:
        """Read a tensor, or its `span` along `dim`. Rows of queries and keys come in whole heads."""
        numbers = self._file.read(self._names[name], dim=dim, span=span)
        if self._architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            numbers = _join_rotary_halves(numbers, self._head_dim)
        elif self._architecture == "gemma3" and name.endswith("norm.weight"):
            numbers = numbers - np.float32(1)
        return numbers

    def config(self) -> dict[str, Any]:
        """What config.json would say."""
        architecture, model_type = ARCHITECTURES[self._architecture]
        config = {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "hidden_size": self._field("embedding_length"),
            "intermediate_size": self._field("feed_forward_length"),
            "num_hidden_layers": self._field("block_count"),
            "num_attention_heads": self._field("attention.head_count"),
            "num_key_value_heads": self._field(
                "attention.head_count_kv", self._field("attention.head_count")
            ),
            "head_dim": self._head_dim,
            "max_position_embeddings": self._field("context_length"),
            # Stored as float32; six digits give back the number that was meant (1e-05, not 9.99999974e-06).
            "rms_norm_eps": float(f"{self._field('attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": float(self._field("rope.freq_base", 10_000.0)),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "lm_head.weight" not in self._names,
            "torch_dtype": self._dtype(),
            **self._token_ids(),
        }
        if self._architecture == "gemma3":
            config |= self._gemma_fields()
        return config

    def _field(self, name: str, default: Any = None) -> Any:
        value = self._file.metadata.get(f"{self._architecture}.{name}", default)
        if value is None:
            raise ConfigError("model", f"the GGUF file lacks the field {self._architecture}.{name}")
        return value

    @property
    def _head_dim(self) -> int:
        even = self._field("embedding_length") // self._field("attention.head_count")
        return int(self._field("attention.key_length", even))

    def _rope_scaling(self) -> dict[str, Any] | None:
        if ROPE_FACTORS in self._file.tensors:
            return {"rope_type": "divided", "divisors": self._file.read(ROPE_FACTORS).tolist()}
        kind = self._field("rope.scaling.type", "none")
        if kind == "none":
            return None
        return {"rope_type": kind, "factor": float(self._field("rope.scaling.factor", 1.0))}

    def _gemma_fields(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": self._field("attention.sliding_window"),
            "sliding_window_pattern": GEMMA_PATTERN,
            "rope_local_base_freq": float(self._field("rope.freq_base_swa", GEMMA_LOCAL_BASE)),
            "query_pre_attn_scalar": self._head_dim,
        }
        if self._field("block_count") == GEMMA_27B_LAYERS:
            config["query_pre_attn_scalar"] = self._field("embedding_length") // self._field(
                "attention.head_count"
            )
        if cap := self._field("final_logit_softcapping", 0.0):
            config["final_logit_softcapping"] = float(cap)
        return config

    def _token_ids(self) -> dict[str, Any]:
        found = {
            name: self._file.metadata.get(f"tokenizer.ggml.{name}_token_id")
            for name in ("bos", "eos", "eot", "padding")
        }
        ends = [token_id for token_id in dict.fromkeys((found["eos"], found["eot"])) if token_id is not None]
        return {
            "bos_token_id": found["bos"],
            "eos_token_id": ends[0] if len(ends) == 1 else ends,
            "pad_token_id": found["padding"] if found["padding"] is not None else found["eos"],
        }

    def _dtype(self) -> str:
        """The numbers that they were quantised from; a file does not say it, and nearly all were bfloat16."""
        kinds = {tensor.kind for tensor in self._file.tensors.values()}
        return "float32" if kinds == {GgufType.F32} else "bfloat16"

    def _translate(self, name: str) -> str:
        layer_names = GEMMA_LAYER_NAMES if self._architecture == "gemma3" else LAYER_NAMES
        parts = name.split(".")
        try:
            if parts[0] == "blk":
                return f"model.layers.{parts[1]}.{layer_names[parts[2]]}.{parts[3]}"
            return f"{TOP_NAMES[parts[0]]}.{parts[1]}"
        except (KeyError, IndexError):
            raise ConfigError("model", f"the GGUF file holds an unknown tensor {name!r}") from None


def _join_rotary_halves(weight: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """weight: [heads * head_dim, ...], rows of each head alternating between its halves -> each half together."""
    assert weight.shape[0] % head_dim == 0, "rows of queries and keys are read in whole heads"
    pairs = weight.reshape(-1, head_dim // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)
