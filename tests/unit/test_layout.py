"""Rounds laid out ahead are those that the requests' states would give."""

from __future__ import annotations

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_psd.channel.messages import RoundRow, Sampling
from sglang_psd.drafter.chain import CATCH_UP
from sglang_psd.drafter.columns import Columns
from sglang_psd.drafter.layout import lay_out
from sglang_psd.drafter.rows import DraftState

K, ROWS, CONTEXT, VOCAB = 3, 6, 24, 4
SAMPLINGS = [
    Sampling(True, 1.0, 1, 1.0, 0.0, None),
    Sampling(False, 0.7, 20, 0.9, 0.1, None),
    Sampling(False, 1.3, 1 << 40, 1.0, 0.0, 7),
]
TOKEN = st.integers(0, VOCAB - 1)


@st.composite
def states(draw: st.DrawFn, row: int) -> DraftState:
    """A request somewhere in its life: fed in part, as a whole, or with drafts beyond its committed tokens."""
    tokens = draw(st.lists(TOKEN, min_size=1, max_size=8))
    state = DraftState(f"r{row}", draw(st.sampled_from(SAMPLINGS)), tokens, pool_row=row)
    if draw(st.booleans()):
        chain = draw(st.lists(TOKEN, min_size=K, max_size=K))
        state.note_chain(chain)
        if draw(st.booleans()):
            state.note_last(chain[-1])
    else:
        state.note_fed(max(0, len(tokens) - draw(st.integers(1, 4))))
    state.num_slots = draw(st.integers(state.num_fed, 30))
    return state


@given(st.data())
@settings(max_examples=600, deadline=None)
def test_a_layout_is_what_the_states_would_give(data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(1, ROWS + 1)))[: data.draw(st.integers(1, ROWS))]
    known = [data.draw(states(row)) for row in order]
    rows = []
    for state in known:
        # As the target would go on: along what was drafted, then with a token of its own.
        drafts = state.fed[len(state.tokens) :]
        new = [*drafts[: data.draw(st.integers(0, K))], data.draw(TOKEN)]
        new = data.draw(st.sampled_from([new, new, new, data.draw(st.lists(st.integers(0, VOCAB), max_size=K + 2))]))
        slip = data.draw(st.sampled_from([0] * 20 + [1]))
        rows.append(RoundRow(state.rid, len(state.tokens) + len(new) + slip, new))
    steps = data.draw(st.integers(1, K))
    expected = copy.deepcopy(known)
    committed = all(state.commit(row.new_tokens, row.base_len) for state, row in zip(expected, rows))
    ordinary = committed and all(
        row.new_tokens
        and max(row.new_tokens) < VOCAB
        and state.missing <= CATCH_UP
        and len(state.tokens) + steps <= min(state.num_slots, CONTEXT)
        for state, row in zip(expected, rows)
    )
    before = copy.deepcopy(known)
    layout = lay_out(known, rows, steps, CONTEXT, VOCAB)
    assert (layout is not None) == ordinary and known == before
    if layout is None:
        return
    assert layout.width == max(state.missing for state in expected)
    size = len(rows) + data.draw(st.integers(0, 2))
    ours, theirs = Columns.empty(size, "cpu"), Columns.empty(size, "cpu")
    assert layout.fill(ours) == theirs.fill(expected)
    assert ours.ints.tolist() == theirs.ints.tolist() and ours.floats.tolist() == theirs.floats.tolist()


def test_a_request_that_is_not_there_is_not_known() -> None:
    state, rows = DraftState("a", SAMPLINGS[0], [1, 2], num_slots=20), [RoundRow("a", 3, [1])]
    assert lay_out([None], rows, K, CONTEXT, VOCAB) is None
    assert lay_out([state], rows, K, CONTEXT, VOCAB) is None  # it has no row in the table
    assert lay_out([], [], K, CONTEXT, VOCAB) is None
