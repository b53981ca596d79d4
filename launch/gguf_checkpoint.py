"""A GGUF file rewritten as a folder in Hugging Face's layout, with float32 weights.

Called by: embedded_model.py, once for each machine. The folder loads in transformers and in our own workers:
`model.safetensors`, `config.json`, `generation_config.json`, `tokenizer.json`, `tokenizer_config.json`.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ..engine.gguf_tokenizer import build_tokenizer, chat_templates, special_tokens
from ..workers.gguf_checkpoint import GgufCheckpoint
from ..workers.gguf_file import open_gguf


def convert_gguf(
    source: Path, folder: Path, on_tensor: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write the model in `source` into the existing, empty `folder`.

    on_tensor: called with (tensors done, tensors in all) after each tensor.
    Raises ConfigError (field "model") when the file is of a family or has a tokenizer that is not known.
    """
    file = open_gguf(source)
    checkpoint = GgufCheckpoint(file)
    weights = {}
    for done, name in enumerate(checkpoint.names, start=1):
        weights[name] = np.ascontiguousarray(checkpoint.read(name))
        on_tensor(done, len(checkpoint.names))
    config = {**checkpoint.config(), "torch_dtype": "float32"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "generation_config.json", {name: config[name] for name in ids})
    build_tokenizer(file.metadata).save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            **special_tokens(file.metadata),
            **_template(chat_templates(file.metadata)),
        },
    )


def _template(templates: dict[str, str]) -> dict[str, str]:
    return {"chat_template": templates["default"]} if "default" in templates else {}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
