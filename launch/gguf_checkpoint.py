"""A GGUF file of the llama family rewritten as a folder in Hugging Face's layout, with float32 weights.

Called by: embedded_model.py, once for each machine. Uses numpy only. The folder loads in transformers and in
our own workers: `model.safetensors`, `config.json`, `generation_config.json`, `tokenizer.json`,
`tokenizer_config.json`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ..shm.errors import ConfigError

ARCHITECTURE = "llama"
PRE_TOKENIZER = "smollm"
"""The only split of text that is rebuilt here: each digit alone, then GPT-2's byte-level words."""

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(
    source: Path, folder: Path, on_tensor: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write the model in `source` into the existing, empty `folder`.

    on_tensor: called with (tensors done, tensors in all) after each tensor.
    Raises ConfigError (field "model") when the file is of another family.
    """
    reader = GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    for key, known in (("general.architecture", ARCHITECTURE), ("tokenizer.ggml.pre", PRE_TOKENIZER)):
        if meta.get(key) != known:
            raise ConfigError(
                "model", f"{source.name}: {key} is {meta.get(key)!r}; only {known!r} can be converted"
            )
    num_heads = int(meta["llama.attention.head_count"])
    num_kv_heads = int(meta["llama.attention.head_count_kv"])
    weights: dict[str, NDArray[np.float32]] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if ".attn_q." in tensor.name:
            weight = _split_rotary_halves(weight, num_heads)
        elif ".attn_k." in tensor.name:
            weight = _split_rotary_halves(weight, num_kv_heads)
        weights[_weight_name(tensor.name)] = np.ascontiguousarray(weight)
        on_tensor(done, len(reader.tensors))
    config = _model_config(
        meta, vocab_size=len(weights["model.embed_tokens.weight"]), tied="lm_head.weight" not in weights
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "generation_config.json", {name: config[name] for name in ids})
    _build_tokenizer(meta).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(meta))


def _weight_name(name: str) -> str:
    parts = name.split(".")
    try:
        if parts[0] == "blk":
            return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
        return f"{TOP_NAMES[parts[0]]}.{parts[1]}"
    except (KeyError, IndexError):
        raise ConfigError("model", f"the GGUF file holds an unknown tensor {name!r}") from None


def _split_rotary_halves(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo the row order of llama GGUFs.

    weight: [num_heads * head_dim, ...]. GGUF alternates the rows of the two rotary halves of each head;
    Hugging Face keeps each half together.
    """
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _model_config(meta: Mapping[str, Any], *, vocab_size: int, tied: bool) -> dict[str, Any]:
    hidden_size = int(meta["llama.embedding_length"])
    num_heads = int(meta["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(meta["llama.context_length"]),
        # Stored as float32; six digits give back the number that was meant (1e-05, not 9.99999974e-06).
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id", meta["tokenizer.ggml.eos_token_id"]),
        "torch_dtype": "float32",
    }


def _build_tokenizer(meta: Mapping[str, Any]) -> Tokenizer:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for text, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True):
        if kind == TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        elif kind == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(text, normalized=False)])
    return tokenizer


def _tokenizer_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta["llama.context_length"]),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    return config


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
