"""Chunk penalties against the plain server's arithmetic, one position at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_psd.target.penalties import PenaltyRow, apply_penalties, count_tokens

VOCAB = 11


def plain_logits(logits: torch.Tensor, generated: list[int], row: PenaltyRow) -> torch.Tensor:
    """What a server without speculation makes of one position's logits."""
    out = logits.clone().double()
    for token in set(generated):
        out[token] -= row.frequency * generated.count(token) + row.presence
        out[token] = out[token] * row.repetition if out[token] < 0 else out[token] / row.repetition
    if len(generated) < row.min_new_tokens:
        out[list(row.stop_ids)] = float("-inf")
    return out


penalty = st.sampled_from([0.0, 0.5, -0.3, 1.7])
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    output=tokens,
    drafts=st.lists(st.integers(0, VOCAB - 1), min_size=0, max_size=5),
    frequency=penalty,
    presence=penalty,
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    min_new=st.integers(0, 12),
    seed=st.integers(0, 1000),
)
def test_every_position_sees_what_came_before(output, drafts, frequency, presence, repetition, min_new, seed) -> None:
    """Position j equals the plain server's logits after output + drafts[:j]; other rows are untouched."""
    torch.manual_seed(seed)
    logits = torch.randn(2, len(drafts) + 1, VOCAB) * 3
    before = logits.clone()
    counts = count_tokens(None, output, VOCAB, "cpu")
    row = PenaltyRow(1, counts, len(output), frequency, presence, repetition, min_new, [2, 7])
    chain = torch.tensor([[0] * len(drafts), drafts], dtype=torch.int64).view(2, len(drafts))
    apply_penalties(logits, chain, [row])
    assert torch.equal(logits[0], before[0])
    for position in range(len(drafts) + 1):
        expected = plain_logits(before[1, position], output + drafts[:position], row)
        torch.testing.assert_close(logits[1, position].double(), expected, rtol=1e-5, atol=1e-5)


def test_counts_grow_with_the_output() -> None:
    """Counting in pieces equals counting at once; nothing new changes nothing."""
    whole = count_tokens(None, [3, 3, 5], VOCAB, "cpu")
    pieces = count_tokens(count_tokens(None, [3], VOCAB, "cpu"), [3, 5], VOCAB, "cpu")
    assert torch.equal(whole, pieces) and whole[3] == 2
    assert torch.equal(count_tokens(pieces, [], VOCAB, "cpu"), whole)


def test_no_rows_is_no_work() -> None:
    """Without penalised rows the logits are not even copied."""
    logits = torch.zeros(1, 1, VOCAB)
    apply_penalties(logits, torch.zeros(1, 0, dtype=torch.int64), [])
    assert not logits.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    """Penalties are computed in float32 and written back in the logits' type; ids past the vocabulary are ignored."""
    logits = torch.ones(1, 2, VOCAB, dtype=dtype)
    row = PenaltyRow(0, count_tokens(None, [1], VOCAB, "cpu"), 1, 0.25, 0.0, 1.0, 3, [4, VOCAB + 5])
    apply_penalties(logits, torch.tensor([[1]]), [row])
    assert logits.dtype == dtype
    assert logits[0, 0, 1] == 0.75 and logits[0, 1, 1] == 0.5
    assert torch.isinf(logits[0, :, 4]).all()
