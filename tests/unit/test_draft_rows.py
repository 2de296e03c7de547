"""Drafts gathered as arrays, against the same done request by request."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_psd.channel import messages as m
from sglang_psd.channel.draft_rows import DraftBatch, ProposalTable

K = 3


@st.composite
def tables(draw: st.DrawFn) -> m.Proposals:
    """Proposals of a few rows, some with a law."""
    rows, steps = draw(st.integers(1, 5)), draw(st.integers(1, K))
    sampled = sorted(draw(st.sets(st.integers(0, rows - 1))))
    top_m = draw(st.integers(1, 4)) if sampled else 0
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    law = (len(sampled), steps, top_m)
    return m.Proposals(
        round_id=0,
        rids=[str(i) for i in range(rows)],
        base_lens=rng.integers(1, 99, rows).tolist(),
        counts=rng.integers(0, steps + 1, rows).tolist(),
        num_steps=steps,
        tokens=rng.integers(1, 300, (rows, steps), m.TOKEN).tobytes(),
        sampled=sampled,
        top_m=top_m,
        law_ids=rng.integers(1, 300, law, m.TOKEN).tobytes(),
        law_probs=rng.random(law, m.PROB).tobytes(),
        received_s=1.0,
        started_s=2.0,
        finished_s=3.0,
    )


@given(st.lists(tables(), max_size=3), st.data())
@settings(max_examples=300, deadline=None)
def test_a_batch_holds_what_was_put_into_it(messages: list[m.Proposals], data: st.DataObject) -> None:
    size = sum(len(message.rids) for message in messages) + 1
    places = data.draw(st.permutations(range(size)))
    batch, expected = DraftBatch.empty(size, K), {}
    for message in messages:
        order = data.draw(st.permutations(range(len(message.rids))))
        at = [places.pop() for _ in order]
        limits = data.draw(st.lists(st.integers(1, 9), min_size=len(order), max_size=len(order)))
        batch.put(np.array(at), ProposalTable(message), np.array(order), np.array(limits))
        expected.update({place: (message, row, limit) for place, row, limit in zip(at, order, limits)})
    laws = batch.laws()
    assert (laws is not None) == any(message.sampled for message in messages)
    for place in range(size):
        row = batch.row(place)
        if place not in expected:
            assert row is None and not batch.tokens[place].any()
            continue
        message, source, limit = expected[place]
        count = min(limit, message.counts[source])
        tokens = np.frombuffer(message.tokens, m.TOKEN).reshape(-1, message.num_steps)[source, :count]
        assert batch.counts[place] == count and (row is None) == (count == 0)
        assert batch.tokens[place].tolist() == [*tokens, *[0] * (K - count)]
        if row is None:
            continue
        assert row.base_len == message.base_lens[source] and row.tokens.tolist() == tokens.tolist()
        assert (row.law_ids is not None) == (source in message.sampled)
        if laws is None:
            continue
        ids, probs = laws[0][place, :count], laws[1][place, :count]
        if source not in message.sampled:
            assert ids[:, 0].tolist() == tokens.tolist() and probs[:, 0].tolist() == [1.0] * count
            assert not probs[:, 1:].any()
            continue
        shape, index = (-1, message.num_steps, message.top_m), message.sampled.index(source)
        wanted_ids = np.frombuffer(message.law_ids, m.TOKEN).reshape(shape)[index, :count]
        wanted_probs = np.frombuffer(message.law_probs, m.PROB).reshape(shape)[index, :count]
        assert (ids[:, : message.top_m] == wanted_ids).all() and (probs[:, : message.top_m] == wanted_probs).all()
        assert not probs[:, message.top_m :].any()


@given(tables(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_whole_message_is_what_putting_its_rows_gives(message: m.Proposals, data: st.DataObject) -> None:
    size, table = len(message.rids), ProposalTable(message)
    limits = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    whole, expected = DraftBatch.whole(table, K, limits), DraftBatch.empty(size, K)
    if size:
        expected.put(np.arange(size), table, np.arange(size), np.array(limits))
    for name in ("base_lens", "counts", "tokens", "lawful"):
        assert getattr(whole, name).tolist() == getattr(expected, name).tolist(), name
    ours, theirs = whole.laws(), expected.laws()
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert all((mine == other).all() for mine, other in zip(ours, theirs))
