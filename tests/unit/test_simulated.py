"""SGLANG_SIMULATE_ACC_LEN: how many tokens a round, and which."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_psd.errors import PSDConfigError
from sglang_psd.target.simulated import FIXED_TOKEN, SimulatedAcceptance

CHUNK = 4
DRAWS = 4000


def simulated(accept_length: float, method: str = "match-expected", tokens: str = "fixed") -> SimulatedAcceptance:
    return SimulatedAcceptance(accept_length, CHUNK, method, tokens, seed=1)


def staged(counts: list[int]) -> SimpleNamespace:
    """What is read of a ``StagedDrafts``, which lives beside SGLang: drafts 11, 12, 13 in every row."""
    return SimpleNamespace(tokens=torch.tensor([[11, 12, 13]] * len(counts)), count=torch.tensor(counts))


@pytest.mark.parametrize(("asked", "mean"), [(1.0, 1.0), (1.75, 1.75), (2.8, 2.8), (4.0, 4.0), (0.3, 1.0), (9.0, 4.0)])
def test_mean_is_what_was_asked_for_within_the_chunk(asked: float, mean: float) -> None:
    source = simulated(asked)
    draws = [source.draw() for _ in range(DRAWS)]
    assert set(draws) <= {int(mean), int(mean) + 1}
    assert sum(draws) / DRAWS == pytest.approx(mean, abs=0.05)


def test_multinomial_stays_within_the_chunk() -> None:
    source = simulated(2.5, "multinomial")
    draws = [source.draw() for _ in range(DRAWS)]
    assert set(draws) == {1, 2, 3, 4}


def test_equal_seeds_draw_equally_on_all_ranks() -> None:
    first, second = simulated(2.5), simulated(2.5)
    assert [first.draw() for _ in range(50)] == [second.draw() for _ in range(50)]


def test_nobody_gets_more_than_drafts_and_one() -> None:
    tokens, lengths = simulated(3.0).replace(torch.full((3, CHUNK), 7), staged([3, 1, 0]))
    assert lengths.tolist() == [3, 2, 1] and lengths.dtype == torch.int32
    assert tokens.tolist() == [[FIXED_TOKEN] * CHUNK] * 3


def test_real_draft_tokens_end_with_the_rules_token() -> None:
    rule = torch.tensor([[11, 99, 12, 13], [11, 12, 13, 98]])
    tokens, lengths = simulated(2.0, tokens="real-draft-token").replace(rule, staged([3, 3]))
    assert lengths.tolist() == [2, 2]
    assert tokens[:, :2].tolist() == [[11, 99], [11, 12]]


@pytest.mark.parametrize("given", [{"method": "mean"}, {"tokens": "random"}])
def test_unknown_variants_are_refused(given: dict) -> None:
    with pytest.raises(PSDConfigError, match="must be one of"):
        simulated(2.0, **given)
