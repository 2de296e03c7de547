"""Noise of seeded requests: uniform, reproducible, and without visible ties between its arguments."""

from __future__ import annotations

import torch
from scipy import stats

from sglang_psd.noise import gumbel_argmax, seeded_uniforms

KNOWN = [[0.20310281705476102, 0.4990524199652702], [0.9889502807340906, 0.17175814133018047]]


def test_known_values() -> None:
    """The noise is part of the product: the same seed must give the same text in every later version."""
    found = seeded_uniforms(torch.tensor([0, 1234]), torch.tensor([0, 77]), 2)
    again = seeded_uniforms(torch.tensor([0, 1234]), torch.tensor([0, 77]), 2)
    assert torch.equal(found, again)
    expected = torch.tensor(KNOWN, dtype=torch.float64)
    assert torch.allclose(found, expected, atol=0, rtol=1e-15)


def test_uniform() -> None:
    numbers = seeded_uniforms(torch.arange(200).view(-1, 1), torch.arange(100), 50).flatten()
    assert numbers.min() > 0 and numbers.max() < 1
    assert stats.kstest(numbers[::7].numpy(), "uniform").pvalue > 1e-3


def test_neighbours_are_independent() -> None:
    """Next seed, next position, next token: no correlation, so no shared text."""
    numbers = seeded_uniforms(torch.arange(64).view(-1, 1), torch.arange(64), 64) - 0.5
    for axis in range(3):
        near = (numbers * numbers.roll(1, dims=axis)).mean() / numbers.square().mean()
        assert abs(float(near)) < 0.01
    # Seed and position must not be interchangeable either.
    assert abs(float((numbers * numbers.transpose(0, 1)).mean() - numbers.diagonal().square().mean() / 64)) < 1e-3


def test_independent_of_batch_shape() -> None:
    table = seeded_uniforms(torch.tensor([[3], [9]]), torch.tensor([[4, 5], [4, 6]]), 8)
    assert torch.equal(table[1, 1], seeded_uniforms(torch.tensor(9), torch.tensor(6), 8))
    wider = seeded_uniforms(torch.tensor(9), torch.tensor(6), 16)
    assert torch.equal(table[1, 1], wider[:8]), "padding rows of the vocabulary change the text"


def test_large_and_negative_arguments() -> None:
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 2**32])
    numbers = seeded_uniforms(seeds, torch.tensor(2**31), 4)
    assert len({tuple(row) for row in numbers.tolist()}) == len(seeds)


def test_draws_follow_the_law() -> None:
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2])
    count = 40_000
    for seeds, positions in ((torch.arange(count), torch.tensor(3)), (torch.tensor(3), torch.arange(count))):
        seeds, positions = torch.broadcast_tensors(seeds, positions)
        drawn = gumbel_argmax(probs.expand(count, -1), seeds, positions)
        counts = torch.bincount(drawn, minlength=4)
        assert counts[1] == 0
        kept = counts[[0, 2, 3]].numpy()
        assert (
            stats.chisquare(kept, count * probs[[0, 2, 3]].double().numpy() / probs.sum().double().item()).pvalue > 1e-4
        )
