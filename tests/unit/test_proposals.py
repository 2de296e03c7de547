"""What the drafter proposes, and the law it says it used."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from sglang_psd.channel.messages import Sampling
from sglang_psd.drafter.columns import Columns
from sglang_psd.drafter.proposals import draw_proposals
from sglang_psd.drafter.rows import DraftState
from sglang_psd.noise import gumbel_argmax


def sampling(**changes) -> Sampling:
    """Temperature 1, nothing cut, no seed."""
    values = {"greedy": False, "temperature": 1.0, "top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0, "seed": None}
    return Sampling(**{**values, **changes})


GREEDY = sampling(greedy=True, top_k=1)


def draw(logits: torch.Tensor, rows: list[Sampling], positions: torch.Tensor, top_m: int = 32):
    """One step for rows sampled like this."""
    columns = Columns.empty(len(rows), "cpu")
    kinds = columns.fill([DraftState(str(i), row, [0, 1]) for i, row in enumerate(rows)])
    uniforms = torch.rand(len(rows), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return draw_proposals(logits, columns, kinds, positions, uniforms, top_m)


def test_greedy_rows_carry_no_law() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 0.0]])
    tokens, ids, probs = draw(logits, [GREEDY, GREEDY], torch.tensor([3, 3]))
    assert tokens.tolist() == [1, 0] and ids is None and probs is None


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.9, "min_p": 0.02}],
)
@pytest.mark.parametrize("top_m", [2, 5, 32])
def test_tokens_follow_the_law_they_come_with(options, top_m) -> None:
    """The acceptance rule is exact for any law, as long as it is the one that was drawn from."""
    count, vocab = 20_000, 8
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(5)).expand(count, -1)
    tokens, ids, probs = draw(logits, [sampling(**options)] * count, torch.zeros(count).long(), top_m)
    assert ids is not None and probs is not None
    assert ids.shape[1] == min(top_m, vocab)
    assert torch.allclose(probs.sum(-1), torch.ones(count))
    law = torch.zeros(vocab).scatter(0, ids[0], probs[0]).double().numpy()
    counts = torch.bincount(tokens, minlength=vocab).numpy()
    assert not counts[law == 0].any()
    possible = law > 0
    if possible.sum() > 1:
        expected = law[possible] / law[possible].sum() * count
        assert stats.chisquare(counts[possible], expected).pvalue > 1e-4


def test_the_law_is_the_head_of_the_models() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    _, ids, probs = draw(logits, [sampling(temperature=2.0)], torch.tensor([0]), top_m=2)
    assert ids is not None and probs is not None
    assert ids[0].tolist() == [1, 2]
    assert torch.allclose(probs[0], torch.softmax(torch.tensor([1.5, 1.0]), -1))


def test_seeded_rows_use_the_targets_noise() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([11, 12])
    tokens, ids, _ = draw(logits, [sampling(seed=9), sampling(seed=10, temperature=0.5)], positions)
    scaled = logits / torch.tensor([[1.0], [0.5]])
    assert tokens.tolist() == gumbel_argmax(torch.softmax(scaled, -1), torch.tensor([9, 10]), positions).tolist()
    assert ids is None


def test_rows_of_all_kinds() -> None:
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(3))
    rows = [sampling(), GREEDY, sampling(seed=4), sampling(top_k=1), GREEDY]
    tokens, ids, probs = draw(logits, rows, torch.arange(5))
    assert ids is not None and probs is not None and ids.shape == probs.shape == (5, 20)
    best = logits.argmax(-1)
    assert tokens[[1, 3, 4]].tolist() == best[[1, 3, 4]].tolist()
    assert probs[3].tolist() == [1.0] + [0.0] * 19
    alone = gumbel_argmax(torch.softmax(logits[2:3], -1), torch.tensor([4]), torch.tensor([2]))
    assert tokens[2] == alone[0]
