"""Sampled text has the target's law, whatever the drafter proposes; a seed decides it completely.

Statistical tests with fixed seeds: requests start from one token, so that the drafter never has a prompt to catch up
with and every draw of a run is the same on every machine of one arithmetic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models import BOS
from tests.rig.law import exact_law, p_value
from tests.rig.oracle import make_prompts
from tests.rig.rig import Ask, Output, Rig

LENGTH = 4
WAVE = 480
EACH = 600
# A right sampler fails once in ten thousand choices of the seed; a wrong one must fail beyond doubt.
ALPHA = 1e-4
SMALL = {
    "target": "S",
    "skip_tokenizer_init": True,
    "max_running_requests": 48,
    "max_total_tokens": 2048,
}

# Requests of all kinds share the batches.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.7},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.12},
    "all": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
}


def sample(rig: Rig, kinds: list[dict[str, Any]], each: int, *, seeded: bool = False) -> list[list[list[int]]]:
    """``each`` texts of every kind."""
    texts: list[list[list[int]]] = [[] for _ in kinds]
    for first in range(0, each * len(kinds), WAVE):
        numbers = range(first, min(first + WAVE, each * len(kinds)))
        options = [{"temperature": 1.0, **kinds[n % len(kinds)]} for n in numbers]
        if seeded:
            options = [{**option, "sampling_seed": n} for option, n in zip(options, numbers)]
        outputs = rig.run([([BOS], LENGTH, option) for option in options])
        for n, output in zip(numbers, outputs):
            texts[n % len(kinds)].append(output.ids)
        rig.forget()
    return texts


def _texts(models: Path, draft: str, k: int, each: int, mode: str, top_m: int, seeded: bool) -> tuple[list, float]:
    config = {"integrity_checks": False, "proposal_top_m": top_m}
    with Rig(models, draft, k, mode, config=config, **SMALL) as rig:
        texts = sample(rig, list(KINDS.values()), each, seeded=seeded)
        stats = rig.scheduler.psd_stats
        rate = stats.accepted / stats.verified
        # A flush, which is part of this, starts all figures anew.
        rig.idle_check()
        return texts, rate


@pytest.mark.parametrize(
    ("draft", "k", "mode", "top_m", "seeded"),
    [
        ("S_near", 3, "parallel", 32, False),
        ("S_far", 2, "sequential", 32, False),
        ("S_far", 3, "parallel", 3, False),
        ("S_near", 2, "parallel", 32, True),
    ],
    ids=["near", "far", "few proposals", "seeded"],
)
def test_law(run_case, models, draft, k, mode, top_m, seeded) -> None:
    texts, rate = run_case(_texts, models, draft, k, EACH, mode, top_m, seeded, timeout_s=240)
    assert 0.1 < rate < 0.97, f"acceptance of {rate} leaves a branch of the rule untested"
    for (name, options), found in zip(KINDS.items(), texts):
        value = p_value(found, exact_law(models, "S", LENGTH, **options))
        assert value > ALPHA, f"{name}: p = {value}"


def _accept_everything(rows, choice, probs):
    """A wrong rule: no draft is ever rejected."""
    import torch

    from sglang_psd.target.acceptance import draw_from

    count = rows.num_drafts.view(-1, 1)
    vocab = probs.shape[-1]
    law = probs.gather(1, count.unsqueeze(-1).expand(-1, 1, vocab)).squeeze(1)
    last = draw_from(law, rows.uniforms[:, -1]).view(-1, 1)
    tokens = torch.cat([rows.drafts, last], 1).scatter(1, count, last)
    return tokens, (rows.num_drafts + 1).to(torch.int32)


def _skip_the_residual(rows, choice, probs):
    """A subtler one: after a rejection it draws from the target instead of the residual."""
    from sglang_psd.target import acceptance

    original = acceptance._last_law
    acceptance._last_law = lambda rows, probs, accepted: probs.gather(
        1, accepted.view(-1, 1, 1).expand(-1, 1, probs.shape[-1])
    ).squeeze(1)
    try:
        return acceptance.accept_chain(rows, choice, probs)
    finally:
        acceptance._last_law = original


@pytest.mark.parametrize("broken", [_accept_everything, _skip_the_residual])
def test_the_test_sees_a_wrong_rule(run_case, models, broken) -> None:
    def case() -> list[list[list[int]]]:
        from sglang_psd.target import sampler

        assert sampler.accept_chain is not broken
        sampler.accept_chain = broken
        with Rig(models, "S_far", 3, config={"integrity_checks": False}, **SMALL) as rig:
            return sample(rig, [{}], 2 * EACH)

    (texts,) = run_case(case)
    assert p_value(texts, exact_law(models, "S", LENGTH)) < 1e-9


# --- seeds ---------------------------------------------------------------------------------------

PROMPTS = make_prompts(7)
SEEDED: list[Ask] = [
    (ids, 24, {"temperature": 0.9, "top_p": [1.0, 0.8][i % 2], "sampling_seed": 100 + i})
    for i, ids in enumerate(PROMPTS)
]


def _seeded(models: Path, draft: str, mode: str, how: str, **server_args: Any) -> list[Output]:
    with Rig(models, draft, 4, mode, **server_args) as rig:
        if how == "without drafts":
            rig.scheduler.psd_client._fail("the test wants none")
        outputs = rig.run_each(SEEDED) if how == "alone" else rig.run(SEEDED)
        if how != "without drafts":
            rig.idle_check()
        return outputs


def test_a_seed_decides_the_text(run_case, models) -> None:
    """Alone, in a batch, in either mode, with a good, bad, lost drafter or after a retraction."""
    reference = run_case(_seeded, models, "D_mid", "parallel", "without drafts")
    runs = {
        "alone": run_case(_seeded, models, "D_same", "parallel", "alone"),
        "batch": run_case(_seeded, models, "D_same", "parallel", "together"),
        "sequential": run_case(_seeded, models, "D_mid", "sequential", "together"),
        "bad": run_case(_seeded, models, "D_bad", "parallel", "together"),
        "crowded": run_case(
            _seeded, models, "D_mid", "parallel", "together", max_total_tokens=150, schedule_conservativeness=0.05
        ),
        "chunked": run_case(_seeded, models, "D_mid", "parallel", "together", chunked_prefill_size=8),
    }
    for name, outputs in runs.items():
        assert [o.ids for o in outputs] == [o.ids for o in reference], name
    assert sum(output.retractions for output in runs["crowded"]) > 0
    # The drafter shares the noise: where nothing is cut, an equal model guesses everything.
    assert all(o.accepted >= 0.9 * (len(o.ids) - 1 - o.rounds) for o in runs["batch"][::2])


def test_other_seeds_other_texts(run_case, models) -> None:
    def case() -> list[list[int]]:
        with Rig(models, "D_mid", 4) as rig:
            asks = [(PROMPTS[0], 16, {"temperature": 1.0, "sampling_seed": seed}) for seed in [*range(12), 0, 2**40, 3]]
            return [output.ids for output in rig.run(asks)]

    texts = run_case(case)
    assert texts[0] == texts[12] and texts[3] == texts[14]
    assert len({tuple(ids) for ids in texts}) == 13


def test_unseeded_requests_differ(run_case, models) -> None:
    def case() -> list[list[int]]:
        with Rig(models, "D_same", 4) as rig:
            return [output.ids for output in rig.run([(PROMPTS[0], 16, {"temperature": 1.0})] * 12)]

    assert len({tuple(ids) for ids in run_case(case)}) == 12
