"""A GGUF file and a folder in Hugging Face's layout with the same weights, quantised ones included.

Called by: tests of GGUF loading. The file is written with the `gguf` package, which is the reference for its layout.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf_twin(
    folder: Path, path: Path, kind: GGMLQuantizationType, *, rope_divisors: NDArray[np.float32] | None = None
) -> None:
    """Write the model of `folder` to `path`, matrices as `kind`, and round the folder's own weights the same way.

    rope_divisors: [head_dim / 2] of the rotary frequencies, as files of Llama 3 have them
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model_type, heads = config["model_type"], config["num_attention_heads"]
    writer = GGUFWriter(path, ARCHITECTURES[model_type])
    _add_fields(writer, config)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        weight = tensor.numpy()
        stem, _, suffix = name.rpartition(".")
        if weight.ndim == 2:
            data = quants.quantize(weight, kind)
            tensors[name] = torch.from_numpy(quants.dequantize(data, kind).copy())
        else:
            data, is_norm = weight, stem.endswith("norm")
            if model_type == "gemma3_text" and is_norm:
                data = weight + np.float32(1)
                tensors[name] = torch.from_numpy(data - np.float32(1))
        if model_type == "llama" and stem.endswith(("q_proj", "k_proj")):
            data = alternate_halves(data, heads if stem.endswith("q_proj") else config["num_key_value_heads"])
        raw_dtype = kind if weight.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(stem, suffix, model_type), data, raw_dtype=raw_dtype)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def alternate_halves(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Order the rows of queries or keys as llama's GGUFs do: those of the two rotary halves by turns."""
    half = rows.shape[0] // num_heads // 2
    return np.ascontiguousarray(
        rows.reshape(num_heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    )


def add_byte_level_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, cut: str, **flags: Any) -> None:
    """Write a byte-level tokenizer; its added tokens become control tokens. cut: `tokenizer.ggml.pre`"""
    model = json.loads(tokenizer.to_str())["model"]
    special = tokenizer.get_added_tokens_decoder()
    tokens = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([3 if token_id in special else 1 for _, token_id in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)


def _add_fields(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _gguf_name(stem: str, suffix: str, model_type: str) -> str:
    names = GEMMA_NAMES if model_type == "gemma3_text" else NAMES
    if stem in names:
        return f"{names[stem]}.{suffix}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{names[part]}.{suffix}"
