"""The sampler on a GPU draws what it draws on the CPU, from the same logits."""

import numpy as np
import pytest
import torch

from phalanx.workers.config import LogprobsMode
from phalanx.workers.sampler import sample
from phalanx.workers.sampling_rows import SamplingRows
from support.sampling_oracle import new_request, random_row

pytestmark = pytest.mark.gpu

SIZE = 2000


@pytest.mark.parametrize("seed", range(20))
def test_the_same_tokens_and_numbers_as_on_the_cpu(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = [random_row(generator, SIZE, logprobs=4) for _ in range(64)]
    logits = torch.from_numpy(np.stack([row.logits for row in rows]))
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        held = SamplingRows(
            max_num_seqs=64, vocab_size=SIZE, device=device, logprobs_mode=LogprobsMode.RAW_LOGPROBS
        )
        for number, row in enumerate(rows):
            held.add(number, new_request(row))
        counts = np.array([len(row.output) for row in rows])
        steps = []
        for step in range(3):
            steps.append(sample(logits.to(device), held.batch(np.arange(64), counts + step)))
            held.append(steps[-1].token_ids)
        found.append(steps)

    for on_cpu, on_gpu in zip(*found, strict=True):
        assert torch.equal(on_gpu.token_ids.cpu(), on_cpu.token_ids)
        torch.testing.assert_close(
            on_gpu.logprobs[0].values.cpu(), on_cpu.logprobs[0].values, rtol=0, atol=1e-5
        )
        assert torch.equal(on_gpu.logprobs[0].ranks.cpu(), on_cpu.logprobs[0].ranks)
