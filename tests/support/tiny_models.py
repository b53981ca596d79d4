"""Small models in Hugging Face's layout, written in well under a second.

Called by: tests that need a checkpoint. `TRAINED` is a model of this repository that has learnt the text of its
LICENSE by heart, so that its greedy continuations have wide margins; the others have random weights.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

REPOSITORY = Path(__file__).resolve().parents[2]
LICENSE_PATH = REPOSITORY / "LICENSE"
TRAINED = REPOSITORY / "tests" / "fixtures" / "tiny-llama"

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, START_OF_TURN, END_OF_TURN]
END_OF_TURN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` tokens at most: three special ones, 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Write tokenizer.json and tokenizer_config.json with a ChatML template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_model_len,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def llama_config(
    *,
    vocab_size: int = 384,
    hidden_size: int = 48,
    intermediate_size: int = 80,
    num_layers: int = 2,
    num_heads: int = 6,
    num_kv_heads: int = 3,
    head_dim: int | None = 16,
    max_position_embeddings: int = 512,
    rope_scaling: dict[str, Any] | None = None,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    tie_word_embeddings: bool = True,
    dtype: str = "float32",
) -> dict[str, Any]:
    """config.json of a small Llama. head_dim None: the field is absent, and hidden_size / num_heads holds."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": rope_scaling,
        "hidden_act": "silu",
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": 0,
        "eos_token_id": END_OF_TURN_ID,
        "pad_token_id": 0,
        "dtype": dtype,
    }
    if head_dim is not None:
        config["head_dim"] = head_dim
    return config


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "generation_config.json", {name: config[name] for name in names})


def write_tiny_llama(folder: Path, *, seed: int = 0, **shape: Any) -> Path:
    """Write a Llama with random weights and its tokenizer into `folder`, and return it.

    shape: as `llama_config` takes it
    """
    config = llama_config(**shape)
    write_config(folder, config)
    write_tokenizer(
        folder,
        train_tokenizer(LICENSE_PATH.read_text(encoding="utf-8")[:4000], config["vocab_size"]),
        config["max_position_embeddings"],
    )
    dtype = getattr(torch, config["dtype"])
    save_file(
        {name: tensor.to(dtype) for name, tensor in random_tensors(config, seed).items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint. Wide enough that the logits of different tokens stand apart."""
    generator = torch.Generator().manual_seed(seed)
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * (0.3 if len(size) == 1 else 1.5 * size[-1] ** -0.5)

    tensors = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden),
        "model.norm.weight": 1 + normal(hidden),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        tensors[f"{layer}.input_layernorm.weight"] = 1 + normal(hidden)
        tensors[f"{layer}.post_attention_layernorm.weight"] = 1 + normal(hidden)
        sizes = {"q_proj": (queries, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
        for name, size in {**sizes, "o_proj": (hidden, queries)}.items():
            tensors[f"{layer}.self_attn.{name}.weight"] = normal(*size)
            if config["attention_bias"]:
                tensors[f"{layer}.self_attn.{name}.bias"] = normal(size[0])
        mlp = {"gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden)}
        for name, size in {**mlp, "down_proj": (hidden, intermediate)}.items():
            tensors[f"{layer}.mlp.{name}.weight"] = normal(*size)
            if config["mlp_bias"]:
                tensors[f"{layer}.mlp.{name}.bias"] = normal(size[0])
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], hidden)
    return tensors


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
