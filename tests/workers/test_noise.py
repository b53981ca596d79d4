"""Philox against its published vectors, and the noise made of it."""

import numpy as np
import pytest
import torch

from phalanx.workers.noise import MAX_GUMBEL, gumbel_noise, gumbel_rows, log, philox

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = philox(
        tuple(torch.tensor(word) for word in counter), (torch.tensor(key[0]), torch.tensor(key[1]))
    )

    assert tuple(int(word) for word in words) == expected


def test_noise_of_single_ids_is_that_of_whole_rows() -> None:
    seeds = torch.tensor([0, -3, 2**62 + 11])
    positions = torch.tensor([0, 5, 70000])

    rows = gumbel_rows(seeds, positions, 1001)

    for token_id in (0, 1, 2, 3, 4, 999, 1000):
        single = gumbel_noise(seeds, positions, torch.full((3,), token_id))
        assert torch.equal(single, rows[:, token_id])


def test_seed_position_and_stream_each_change_the_noise() -> None:
    def row(seed: int, position: int, stream: int) -> torch.Tensor:
        return gumbel_rows(torch.tensor([seed]), torch.tensor([position]), 64, stream=stream)

    base = row(1, 1, 0)

    for other in (row(1 + 2**40, 1, 0), row(2, 1, 0), row(1, 2, 0), row(1, 1, 1)):
        assert not (other == base).any()


def test_noise_is_standard_gumbel_and_bounded() -> None:
    noise = gumbel_rows(torch.arange(20), torch.arange(20), 20000).numpy()

    assert noise.max() <= MAX_GUMBEL
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.02


def test_the_logarithm_is_one() -> None:
    cells = (torch.arange(0, 2**24, 997).double() + 0.5) * 2.0**-24
    x = torch.cat([cells, 1.0 - cells * 2.0**-24, torch.rand(20000).double() * 20.0 + 1e-9])

    assert ((log(x) - x.log()).abs() <= 1e-12 * x.log().abs()).all()
    assert torch.equal(log(x[::3].clone()), log(x)[::3])
