"""Which token, position and hidden state each row of a head's chain is fed with."""

from __future__ import annotations

import torch

from sglang_psd.channel.messages import Sampling
from sglang_psd.drafter.chain import Chain
from sglang_psd.drafter.columns import Kinds
from sglang_psd.drafter.head_chain import HeadColumns, Vocabulary, draw_mapped, run_head_step
from sglang_psd.drafter.head_rows import HeadState

GREEDY = Sampling(True, 1.0, 1, 1.0, 0.0, None)
WIDTH = 4


def state(rid: str, tokens: int, start: int, fed: int, row: int, sampling: Sampling = GREEDY) -> HeadState:
    """Token i is ``100 + i``; hidden states up to the last token but one have come."""
    text = [100 + i for i in range(tokens)]
    made = HeadState(rid, sampling, text, start, start, tokens - 1 - start, fed, pool_row=row)
    made.waiting = [torch.arange(start + fed, tokens - 1).view(-1, 1)]
    return made


def columns(*states: HeadState, size: int) -> tuple[HeadColumns, list[int], torch.Tensor]:
    made = HeadColumns.empty(size, WIDTH, "cpu")
    _, picks = made.fill(states)
    return made, picks, torch.cat([piece for s in states for piece in s.waiting])


def test_first_step() -> None:
    a, b = state("a", tokens=9, start=0, fed=5, row=3), state("b", tokens=6, start=2, fed=2, row=7)
    made, picks, waiting = columns(a, b, size=3)
    rows, lens, positions = (t.view(WIDTH, 3) for t in made.step_batch(0))
    ids = made.extra[2:]
    features = waiting[picks].view(WIDTH, 3)
    assert rows[:, 0].tolist() == [3] * 4 and rows[:, 1].tolist() == [7] * 4 and rows[:, 2].tolist() == [0] * 4
    # a: hidden states 5, 6, 7 with tokens 6, 7, 8; the first place is filled by the first of them.
    assert positions[:, 0].tolist() == [5, 5, 6, 7]
    assert features[:, 0].tolist() == [5, 5, 6, 7]
    assert ids[:, 0].tolist() == [106, 106, 107, 108]
    assert lens[:, 0].tolist() == [6, 6, 7, 8]
    # b: its context begins at position 2, so its KV is shorter than its positions.
    assert positions[:, 1].tolist() == [4] * 4
    assert features[:, 1].tolist() == [4] * 4
    assert ids[:, 1].tolist() == [105] * 4
    assert lens[:, 1].tolist() == [3] * 4
    # Padding: one token at position 0 of the padding row.
    assert positions[:, 2].tolist() == [0] * 4 and lens[:, 2].tolist() == [1] * 4


def test_batches_of_one_request_are_contiguous() -> None:
    """GPU kernels read them without strides: one request repeated must not be a view that stands still."""
    made, _, _ = columns(state("a", tokens=9, start=0, fed=5, row=3), size=1)
    assert all(t.stride() == (1,) for t in (*made.step_batch(0), *made.step_batch(1)))


def test_later_steps() -> None:
    made, _, _ = columns(state("a", 9, 0, 5, 3), state("b", 6, 2, 2, 7), size=2)
    rows, lens, positions = made.step_batch(1)
    assert rows.tolist() == [3, 7]
    assert positions.tolist() == [8, 5], "the first draft stands where the last committed token's successor does"
    assert lens.tolist() == [9, 4]
    assert made.step_batch(2)[2].tolist() == [9, 6] and made.step_batch(2)[1].tolist() == [10, 5]


def test_a_chain_feeds_drafts_with_the_heads_own_output() -> None:
    made, picks, waiting = columns(state("a", 9, 0, 5, 3), size=1)
    seen = []

    def decode(rows, lens, positions, ids, hidden):
        step = len(seen)
        seen.append((positions.tolist(), ids.tolist(), hidden.view(-1).tolist()))
        logits = torch.zeros(len(rows), 300)
        logits[:, 40 + step] = 1
        return logits, torch.full((len(rows), 1), 1000.0 + step)

    chain, hidden = Chain.empty(3, 1, 8, "cpu"), waiting[picks].float()
    for step in range(3):
        hidden = run_head_step(decode, made, hidden, chain, Kinds(), None, step, Vocabulary(300))
    assert chain.to_host(Kinds(), 1).tokens.tolist() == [[40, 41, 42]]
    assert seen[0] == ([5, 5, 6, 7], [106, 106, 107, 108], [5.0, 5.0, 6.0, 7.0])
    assert seen[1] == ([8], [40], [1000.0])
    assert seen[2] == ([9], [41], [1001.0])


def _columns_of(sampling: Sampling) -> HeadColumns:
    return columns(state("a", 9, 0, 5, 3, sampling), size=1)[0]


def test_a_reduced_vocabulary_speaks_the_targets_ids() -> None:
    known = torch.tensor([2, 5, 7])
    logits = torch.tensor([[0.0, 2.0, 1.0, 50.0]])  # the last entry is padding of the output matrix
    base = _columns_of(GREEDY).base
    ids, _, _ = draw_mapped(logits, base, Kinds(), base.lens, None, 8, Vocabulary(10, known))
    assert ids.tolist() == [5]
    sampled = _columns_of(Sampling(False, 1.0, 1 << 30, 1.0, 0.0, None)).base
    uniform = torch.tensor([0.999999], dtype=torch.float64)
    ids, law_ids, law = draw_mapped(
        logits, sampled, Kinds(sampled=True), sampled.lens, uniform, 8, Vocabulary(10, known)
    )
    assert law_ids is not None and law is not None
    assert sorted(law_ids[0].tolist()) == [2, 5, 7] and abs(float(law.sum()) - 1) < 1e-6
    expected = torch.softmax(logits[0, :3], 0)
    assert all(
        abs(float(law[0, i] - expected[known.tolist().index(t)])) < 1e-6 for i, t in enumerate(law_ids[0].tolist())
    )
    assert ids.tolist() == [2]


def test_noise_belongs_to_the_targets_ids() -> None:
    """A head of fewer tokens draws as one of all tokens that gives the others no chance."""
    known = torch.tensor([2, 5, 7])
    base = _columns_of(Sampling(False, 1.0, 1 << 30, 1.0, 0.0, 77)).base
    for seed_shift in range(20):
        base.ints[6] = seed_shift
        logits = torch.zeros(1, 3)
        whole = torch.full((1, 10), float("-inf")).index_copy(1, known, logits)
        kinds = Kinds(seeded=True)
        found = draw_mapped(logits, base, kinds, base.lens, None, 8, Vocabulary(10, known))[0]
        assert found.tolist() == draw_mapped(whole, base, kinds, base.lens, None, 8, Vocabulary(10))[0].tolist()
