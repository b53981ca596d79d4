"""Small tokenizers, built on the spot in the layouts that models come in."""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "Hello world, this is a small corpus for a small tokenizer.",
    "The quick brown fox jumps over the lazy dog. STOP and stopping, stops.",
    "Grüße aus München, 你好世界, 🌶🔥, naïve café.",
    "user assistant system Paris is the capital of France.",
]


def build_byte_level(folder: Path, **config: object) -> Path:
    """GPT-2's layout: any byte has a token, nothing is ever unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _write(folder, tokenizer, {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", **config})


def build_metaspace(folder: Path, **config: object) -> Path:
    """Llama 2's layout: spaces are letters, unknown characters are spelled in bytes, bos stands in front."""
    special = ["<unk>", "<s>", "</s>"]
    bytes_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=special + bytes_tokens, show_progress=False)
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator([CORPUS[0], CORPUS[1], CORPUS[3]], trainer)
    model = json.loads(trained.to_str())["model"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 1)]
    )
    return _write(
        folder, tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    )


def _write(folder: Path, tokenizer: Tokenizer, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
