"""Where the weights of a checkpoint lie: safetensors files or one GGUF file, read through the same three calls.

Called by: weights.py. The files are mapped: only the bytes of what is read are touched.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from .errors import WeightsError
from .gguf_checkpoint import GgufCheckpoint
from .gguf_file import is_gguf, open_gguf
from .span import Span

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class TensorSource(Protocol):
    """Tensors by name, as Hugging Face's checkpoints call them."""

    @property
    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, *, dim: int | None, span: Span | None) -> torch.Tensor:
        """Read a tensor on the CPU, or its `span` (not empty) along `dim`; any dtype."""
        ...


@contextmanager
def open_source(path: Path) -> Iterator[TensorSource]:
    """Open the tensors of a folder, or of a GGUF file. Raises WeightsError, ConfigError."""
    if is_gguf(path):
        yield _GgufSource(GgufCheckpoint(open_gguf(path)))
        return
    with ExitStack() as stack:
        yield _SafetensorsSource([stack.enter_context(_open(path / name)) for name in _file_names(path)])


class _SafetensorsSource:
    def __init__(self, files: list[Any]) -> None:
        self._files = {name: file for file in files for name in file.keys()}

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str, *, dim: int | None, span: Span | None) -> torch.Tensor:
        source = self._files[name].get_slice(name)
        if dim is None or span is None:
            tensor: torch.Tensor = source[:]
        elif dim == 0:
            tensor = source[span.start : span.stop]
        else:
            tensor = source[:, span.start : span.stop]
        return tensor


class _GgufSource:
    def __init__(self, checkpoint: GgufCheckpoint) -> None:
        self._checkpoint = checkpoint

    @property
    def names(self) -> list[str]:
        return self._checkpoint.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def read(self, name: str, *, dim: int | None, span: Span | None) -> torch.Tensor:
        return torch.from_numpy(self._checkpoint.read(name, dim=dim, span=span))


def _file_names(folder: Path) -> Iterator[str]:
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            yield from sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise WeightsError(f"{index} is not an index of safetensors files: {error!r}") from None
    elif (folder / SINGLE_NAME).is_file():
        yield SINGLE_NAME
    else:
        raise WeightsError(f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot read {path}: {error}") from None
