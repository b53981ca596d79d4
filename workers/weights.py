"""Weights: from a checkpoint on disk straight into this rank's parameters.

Called by: Worker.start(). Each rank reads only its slices; the files are mapped, so no rank ever holds a whole
tensor that it does not need, and there is no second copy of the model. Onto a GPU several threads read and copy
(device_upload.py); on CPU the copy itself has threads.
"""

import zlib
from functools import partial
from pathlib import Path

import torch

from .config import LoadFormat
from .device_upload import upload_all
from .errors import WeightsError
from .layers.shard import TensorShard
from .models.causal_lm import CausalLM
from .tensor_source import TensorSource, open_source

DUMMY_RANGE = 1e-3
DUMMY_CHUNK = 1 << 22
"""Elements of a dummy tensor made at once: bounds the memory for the integers they come from."""


def load_weights(model: CausalLM, path: str, load_format: LoadFormat, *, seed: int = 0) -> int:
    """Fill all parameters of `model`, which must have memory already. Returns their bytes.

    path: a folder, or a GGUF file
    seed: of dummy weights, which depend on it and on the tensor's name, not on how the model is split
    Raises WeightsError when a tensor is missing, has another shape, or is not known; nothing to be used then.
    """
    shards = list(model.shards())
    match load_format:
        case LoadFormat.AUTO:
            with open_source(Path(path)) as source:
                _load(model, shards, source, path)
        case LoadFormat.DUMMY:
            for shard in shards:
                _fill_dummy(shard, seed)
    return sum(parameter.nbytes for parameter in model.parameters())


def _load(model: CausalLM, shards: list[TensorShard], source: TensorSource, path: str) -> None:
    # Our name of a tensor -> its name in the checkpoint.
    found = {own: name for name in source.names if (own := model.own_name(name)) is not None}
    unexpected = sorted(found.keys() - {shard.name for shard in shards})
    if unexpected:
        raise WeightsError(
            f"{path} holds {len(unexpected)} tensors that the model has no place for, among them {unexpected[0]}"
        )
    for shard in shards:
        if shard.name not in found:
            raise WeightsError(f"{path} lacks the tensor {shard.name}")
        name = found[shard.name]
        shape = source.shape(name)
        if shape != shard.full_shape:
            raise WeightsError(
                f"the tensor {shard.name} has the shape {shape}, and should have {shard.full_shape}"
            )
    held = [shard for shard in shards if shard.span is None or shard.span.size]
    # The copies convert the dtype.
    if held and held[0].target.device.type == "cuda":
        upload_all(
            ((shard.target, partial(_read, source, found[shard.name], shard)) for shard in held),
            held[0].target.device,
        )
        return
    for shard in held:
        shard.target.copy_(_read(source, found[shard.name], shard))


def _read(source: TensorSource, name: str, shard: TensorShard) -> torch.Tensor:
    return source.read(name, dim=shard.dim, span=shard.span)


def _fill_dummy(shard: TensorShard, seed: int) -> None:
    """Uniform numbers in ±DUMMY_RANGE. Each depends on its place in the whole tensor, so every split agrees."""
    key = zlib.crc32(shard.name.encode(), seed)
    target = shard.target
    rows = target.unsqueeze(-1) if target.dim() == 1 else target
    full_width = shard.full_shape[1] if len(shard.full_shape) == 2 else 1
    first_row = shard.span.start if shard.span is not None and shard.dim == 0 else 0
    first_column = shard.span.start if shard.span is not None and shard.dim == 1 else 0
    columns = torch.arange(first_column, first_column + rows.shape[1], device=target.device)
    rows_at_once = max(1, DUMMY_CHUNK // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], rows_at_once):
        part = rows[start : start + rows_at_once]
        index = torch.arange(first_row + start, first_row + start + part.shape[0], device=target.device)
        bits = _mix((index * full_width).unsqueeze(1) + columns, key)
        part.copy_(bits.double().mul_(2.0**-31).sub_(1.0).mul_(DUMMY_RANGE))


def _mix(x: torch.Tensor, key: int) -> torch.Tensor:
    """Hash of 32 bits (the finaliser of MurmurHash3) in int64 arithmetic; x is overwritten. Returns [0, 2^32)."""
    x.bitwise_xor_(key)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x.bitwise_xor_(x >> shift).mul_(factor).bitwise_and_(0xFFFFFFFF)
    return x.bitwise_xor_(x >> 16)
