"""The drafter's bookkeeping against a model that just compares the two token lists."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_psd.channel.messages import Sampling
from sglang_psd.drafter.rows import DraftState

GREEDY = Sampling(greedy=True, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed=None)
# Few tokens, so that drafts are often right by chance.
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@given(TOKENS, st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), TOKENS), max_size=8))
@settings(max_examples=300, deadline=None)
def test_fed_is_the_agreeing_prefix(prompt: list[int], rounds: list[tuple[list[int], list[int]]]) -> None:
    """Rounds of (drafts fed, tokens committed): KV is kept exactly as far as it agrees, less the last token."""
    state = DraftState("r", GREEDY, list(prompt))
    committed, fed = list(prompt), []
    for drafts, new in rounds:
        # A round feeds all committed tokens, then its drafts but the last.
        state.fed = [*state.tokens, *drafts]
        fed = [*committed, *drafts]
        assert state.commit(new, len(committed) + len(new))
        committed += new
        fed = fed[: min(common_prefix(fed, committed), len(committed) - 1)]
        assert state.tokens == committed
        assert state.fed == fed
        assert state.missing == len(committed) - len(fed) >= 1


def test_a_lost_message_is_noticed() -> None:
    state = DraftState("r", GREEDY, [1, 2, 3], fed=[1, 2])
    for base_len in (3, 5, 6):
        assert not state.commit([4], base_len)
        assert state.tokens == [1, 2, 3] and state.fed == [1, 2]
    assert state.commit([4], 4)


def test_full_acceptance_leaves_two_to_catch_up() -> None:
    """All of k drafts accepted plus the bonus: the last draft and the bonus have no KV yet."""
    state = DraftState("r", GREEDY, [1, 2], fed=[1, 2, 7, 8])  # drafts 7, 8, 9: 9 was never fed
    assert state.commit([7, 8, 9, 5], 6)
    assert state.missing == 2


def test_rejection_leaves_one() -> None:
    state = DraftState("r", GREEDY, [1, 2], fed=[1, 2, 7, 8])
    assert state.commit([6], 3)
    assert state.fed == [1, 2] and state.missing == 1


def test_a_row_that_comes_twice_is_taken_once() -> None:
    state = DraftState("r", GREEDY, [1, 2, 3])
    assert state.commit([4, 5], 5)
    state.fed = [1, 2, 3, 4, 5, 8, 9]  # drafts 8, 9 and one more were made for it
    assert state.commit([4, 5], 5)
    assert state.tokens == [1, 2, 3, 4, 5] and state.fed == [1, 2, 3, 4]
    assert not state.commit([9, 9], 5), "another row of that length"
    assert not state.commit([4, 5], 6)
    assert state.tokens == [1, 2, 3, 4, 5]
