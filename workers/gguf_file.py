"""A GGUF file: its metadata, and its tensors as float32, any part of them.

Called by: gguf_checkpoint.py in the worker processes, the front end's tokenizer for the metadata. No torch. The
file is mapped: only the bytes of what is read are touched.

    header   "GGUF", version, number of tensors, number of metadata entries
    entries  key, type, value; a list carries the type of its items
    infos    name, dimensions (fastest first), format, offset into the data
    data     aligned to general.alignment
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..shm.errors import ConfigError
from .gguf_quants import FORMATS, GgufType, dequantize
from .span import Span

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
"""struct formats by the file's numbers of types."""
STRING, LIST = 8, 9
KNOWN_TYPES = frozenset(GgufType)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """shape: slowest dimension first; start: of its bytes in the file."""

    shape: tuple[int, ...]
    kind: GgufType
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: of the fastest dimension."""
        block = FORMATS[self.kind]
        return self.shape[-1] // block.block_size * block.num_bytes

    @property
    def num_rows(self) -> int:
        """Rows in all."""
        return int(np.prod(self.shape[:-1], dtype=np.int64))


class GgufFile:
    """An open file. Made by `open_gguf`; closed when nobody refers to it any more.

    metadata: values by key; lists are lists
    tensors:  by name
    """

    def __init__(
        self, data: NDArray[np.uint8], metadata: dict[str, Any], tensors: dict[str, GgufTensor]
    ) -> None:
        self._data = data
        self.metadata = metadata
        self.tensors = tensors

    def read(self, name: str, *, dim: int | None = None, span: Span | None = None) -> NDArray[np.float32]:
        """Read a tensor of one or two dimensions, or its `span` along `dim`. Reads the blocks that hold it, no more."""
        tensor = self.tensors[name]
        width = tensor.shape[-1]
        rows = Span(start=0, size=tensor.num_rows)
        columns = Span(start=0, size=width)
        if span is not None and dim is not None:
            if dim == len(tensor.shape) - 1:
                columns = span
            else:
                rows = span
        block = FORMATS[tensor.kind]
        first, last = columns.start // block.block_size, -(-columns.stop // block.block_size)
        start = tensor.start + rows.start * tensor.row_bytes
        lines = self._data[start : start + rows.size * tensor.row_bytes].reshape(rows.size, tensor.row_bytes)
        numbers = dequantize(lines[:, first * block.num_bytes : last * block.num_bytes], tensor.kind)
        offset = columns.start - first * block.block_size
        numbers = numbers[:, offset : offset + columns.size]
        return numbers[0] if len(tensor.shape) == 1 else numbers


def is_gguf(path: Path) -> bool:
    """True when `path` is a file that calls itself GGUF."""
    return path.suffix == ".gguf" and path.is_file()


def open_gguf(path: str | Path) -> GgufFile:
    """Map a file and read its header. Raises ConfigError (field "model") when it is no GGUF file, or damaged."""
    try:
        data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        return _parse(data)
    except (struct.error, IndexError, ValueError, OSError) as error:
        raise ConfigError("model", f"cannot read {path} as a GGUF file: {error}") from None


class _Cursor:
    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def scalar(self, kind: int) -> Any:
        layout = SCALARS[kind]
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def string(self) -> str:
        size = self.scalar(10)
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise ValueError("it was cut short")
        return bytes(self.data[start : self.at]).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == LIST:
            item, count = self.scalar(4), self.scalar(10)
            if item in SCALARS:
                layout = np.dtype(SCALARS[item])
                start, self.at = self.at, self.at + count * layout.itemsize
                return np.frombuffer(self.data[start : self.at], dtype=layout).tolist()
            return [self.value(item) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"a metadata entry has the unknown type {kind}")
        return self.scalar(kind)


def _parse(data: NDArray[np.uint8]) -> GgufFile:
    cursor = _Cursor(data.data)
    if bytes(data[:4]) != b"GGUF":
        raise ValueError("it does not begin with 'GGUF'")
    cursor.at = 4
    version = cursor.scalar(4)
    if version not in VERSIONS:
        raise ValueError(f"version {version} is not one of {', '.join(map(str, VERSIONS))}")
    num_tensors, num_entries = cursor.scalar(10), cursor.scalar(10)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar(4))
    infos = []
    for _ in range(num_tensors):
        name, num_dims = cursor.string(), cursor.scalar(4)
        dims = [cursor.scalar(10) for _ in range(num_dims)]
        infos.append((name, tuple(reversed(dims)), cursor.scalar(4), cursor.scalar(10)))
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    data_start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in infos:
        if kind not in KNOWN_TYPES:
            known = ", ".join(known.name for known in GgufType)
            raise ValueError(f"the tensor {name} has the format number {kind}; known are {known}")
        tensor = GgufTensor(shape=shape, kind=GgufType(kind), start=data_start + offset)
        if tensor.start + tensor.num_rows * tensor.row_bytes > len(data):
            raise ValueError("it was cut short")
        tensors[name] = tensor
    return GgufFile(data, metadata, tensors)
