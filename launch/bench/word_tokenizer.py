"""A tokenizer for a model folder that has none: token i is the word " ti". For benchmarks of models without weights.

Called by: multi_gpu.py.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ...workers.transformer_config import read_transformer_config

TOKENIZER_FILE = "tokenizer.json"


@contextmanager
def with_word_tokenizer(folder: str) -> Iterator[Path]:
    """Give `folder` itself when it has a tokenizer, else a folder of links to its files, and a tokenizer of words."""
    source = Path(folder).resolve()
    if (source / TOKENIZER_FILE).exists():
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="cluster-bench-") as scratch:
        made = Path(scratch) / source.name
        made.mkdir()
        for path in source.iterdir():
            (made / path.name).symlink_to(path)
        vocab_size = read_transformer_config(folder).vocab_size
        vocab = {f"t{token_id}": token_id for token_id in range(vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="t0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.decoder = decoders.Fuse()
        tokenizer.save(str(made / TOKENIZER_FILE))
        yield made
