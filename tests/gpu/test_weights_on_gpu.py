"""Weights on a GPU are those of the file, whatever their size and type."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phalanx.workers import device_upload
from phalanx.workers.config import DeviceType, DType, ParallelConfig
from support.model_steps import make_worker
from support.tiny_models import write_tiny_llama

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("staging_bytes", [100, 5000, 16 << 20])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_uploaded_weights_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: DType, staging_bytes: int
) -> None:
    monkeypatch.setattr(device_upload, "STAGING_BYTES", staging_bytes)
    folder = write_tiny_llama(tmp_path, attention_bias=True, tie_word_embeddings=False)
    worker = make_worker(folder, parallel=ParallelConfig(device=DeviceType.CUDA), dtype=dtype)

    worker.start()

    tensors = load_file(folder / "model.safetensors")
    for shard in worker.model.shards():
        expected = tensors[shard.name].to(getattr(torch, dtype.value))
        assert torch.equal(shard.target.cpu(), expected), shard.name
    worker.close()
