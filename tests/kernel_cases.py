"""Cases for the Triton kernels, run on a GPU or in the interpreter."""

from __future__ import annotations

import itertools

import torch

VOCABULARIES = (5, 320, 9000)
FILTERS = [
    (1 << 30, 1.0, 0.0),
    (1, 1.0, 0.0),
    (3, 1.0, 0.0),
    (1 << 30, 0.7, 0.0),
    (1 << 30, 1e-9, 0.0),
    (40, 0.95, 0.05),
    (1 << 30, 1.0, 0.3),
    (2, 0.5, 0.9),
]


def run(device: str) -> dict:
    """Compare every case; returns counts and what differed."""
    failures: list[str] = []
    law_cases = noise_cases = 0
    for vocab_size, dtype in itertools.product(VOCABULARIES, (torch.float32, torch.bfloat16)):
        law_cases += len(FILTERS)
        failures += _law(vocab_size, dtype, device)
        noise_cases += 8
        failures += _noise(vocab_size, device)
    failures += _ties(device)
    return {"law_cases": law_cases, "noise_cases": noise_cases, "failures": failures}


def _filters(settings, device):
    from sglang_psd.target.acceptance import Filters

    count = len(settings)
    top_ks, top_ps, min_ps = zip(*settings)
    return Filters(
        temperatures=torch.linspace(0.3, 1.7, count, device=device),
        top_ks=torch.tensor(top_ks, device=device),
        top_ps=torch.tensor(top_ps, device=device),
        min_ps=torch.tensor(min_ps, device=device),
        greedy=torch.zeros(count, dtype=torch.bool, device=device),
        seeded=torch.zeros(count, dtype=torch.bool, device=device),
        seeds=torch.zeros(count, dtype=torch.int64, device=device),
        any_sampled=True,
        any_seeded=False,
        any_filter=True,
    )


def _law(vocab_size, dtype, device):
    from sglang_psd.kernels import filtered_law
    from sglang_psd.target.acceptance import filtered_probs_reference

    # Distinct logits: where tokens tie at the edge of a cut the twins choose differently (see ``_ties``).
    rows = [torch.randperm(vocab_size, generator=torch.Generator().manual_seed(i)) for i in range(2 * len(FILTERS))]
    logits = torch.stack(rows).view(len(FILTERS), 2, vocab_size) * (20.0 / vocab_size)
    if dtype == torch.bfloat16:
        logits = torch.randn(len(FILTERS), 2, vocab_size, generator=torch.Generator().manual_seed(7)) * 3
        # bf16 has few values: take the law of a plain temperature, where ties do not matter.
        settings = [(1 << 30, 1.0, 0.0)] * len(FILTERS)
    else:
        settings = FILTERS
    logits = logits.to(device, dtype)
    filters = _filters(settings, device)
    expected = filtered_probs_reference(logits, filters)
    got = filtered_law(logits, filters.temperatures, filters.top_ks, filters.top_ps, filters.min_ps)
    gaps = (expected - got).abs().amax(dim=(1, 2)).tolist()
    support = ((expected > 0) == (got > 0)).all(dim=2).all(dim=1).tolist()
    return [
        f"law V={vocab_size} {dtype} {setting}: gap {gap}, same support {same}"
        for setting, gap, same in zip(settings, gaps, support)
        if gap > 2e-6 or (not same and dtype == torch.float32)
    ]


def _ties(device):
    """All tokens that tie at the edge stay."""
    from sglang_psd.kernels import filtered_law

    logits = torch.tensor([[[2.0, 1.0, 1.0, 1.0, 0.0]]], device=device)
    one = torch.ones(1, device=device)
    law = filtered_law(logits, one, torch.tensor([2], device=device), one, torch.zeros(1, device=device))
    kept = (law[0, 0] > 0).tolist()
    return [] if kept == [True, True, True, True, False] else [f"ties: kept {kept}"]


def _noise(vocab_size, device):
    from sglang_psd.kernels import noisy_argmax
    from sglang_psd.noise import gumbel_argmax_reference

    generator = torch.Generator().manual_seed(vocab_size)
    probs = torch.softmax(torch.randn(4, vocab_size, generator=generator) * 2, -1)
    probs[0, : vocab_size // 2] = 0
    probs = probs.to(device)
    seeds = torch.tensor([0, 1, -5, 2**62], device=device)
    positions = torch.tensor([0, 17, 4000, 131071], device=device)
    expected = gumbel_argmax_reference(probs, seeds, positions)
    got = noisy_argmax(probs, seeds, positions)
    failures = [] if torch.equal(expected, got) else [f"noise V={vocab_size}: {expected.tolist()} != {got.tolist()}"]
    # One request in a chunk of four positions: its seed is expanded, a view of stride 0 over memory of other things.
    seed = torch.tensor([9, 1, 2, 3], device=device)[:1].expand(4)
    expected, got = gumbel_argmax_reference(probs, seed, positions), noisy_argmax(probs, seed, positions)
    return failures if torch.equal(expected, got) else [*failures, f"noise V={vocab_size}, one seed for all rows"]
