"""A tiny random llama with a tokenizer in one GGUF file, made without torch.

Called by: tests of loading and launching.
"""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 16, 4, 2, 24, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "Ġ", "1", "2", "ab", "12", "Ġa"]
MERGES = ["a b", "1 2", "Ġ a"]


def permute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Order rows as llama GGUFs do: the inverse of what the conversion undoes."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, architecture: str = "llama") -> dict[str, NDArray[np.float32]]:
    """Write a small random model; returns its weights under Hugging Face's names."""
    random = np.random.default_rng(0)
    head_dim = HIDDEN // HEADS
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    made: dict[str, NDArray[np.float32]] = {}

    def add(theirs: str, ours: str, *shape: int, heads: int = 0) -> None:
        weight = random.standard_normal(shape).astype(np.float32)
        made[ours] = weight
        writer.add_tensor(theirs, permute(weight, heads) if heads else weight)

    add("token_embd.weight", "model.embed_tokens.weight", len(TOKENS), HIDDEN)
    add("output_norm.weight", "model.norm.weight", HIDDEN)
    for i in range(LAYERS):
        b, layer = f"blk.{i}", f"model.layers.{i}"
        add(f"{b}.attn_norm.weight", f"{layer}.input_layernorm.weight", HIDDEN)
        add(f"{b}.attn_q.weight", f"{layer}.self_attn.q_proj.weight", HEADS * head_dim, HIDDEN, heads=HEADS)
        add(
            f"{b}.attn_k.weight",
            f"{layer}.self_attn.k_proj.weight",
            KV_HEADS * head_dim,
            HIDDEN,
            heads=KV_HEADS,
        )
        add(f"{b}.attn_v.weight", f"{layer}.self_attn.v_proj.weight", KV_HEADS * head_dim, HIDDEN)
        add(f"{b}.attn_output.weight", f"{layer}.self_attn.o_proj.weight", HIDDEN, HIDDEN)
        add(f"{b}.ffn_norm.weight", f"{layer}.post_attention_layernorm.weight", HIDDEN)
        add(f"{b}.ffn_gate.weight", f"{layer}.mlp.gate_proj.weight", INNER, HIDDEN)
        add(f"{b}.ffn_up.weight", f"{layer}.mlp.up_proj.weight", INNER, HIDDEN)
        add(f"{b}.ffn_down.weight", f"{layer}.mlp.down_proj.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made
