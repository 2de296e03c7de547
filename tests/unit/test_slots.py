"""Who belongs in which slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_psd.scheduler.slots import Move, admission_share, next_turn, plan_move

SIZES = st.tuples(st.integers(0, 40), st.integers(0, 40))


def test_turns() -> None:
    assert [next_turn(turn, 2) for turn in (0, 1)] == [1, 0]
    assert next_turn(0, 1) == 0


@given(SIZES, st.integers(0, 60))
def test_admission_evens_out(sizes: tuple[int, int], waiting: int) -> None:
    """Asked in turn, the slots take everybody and end up as even as they can."""
    now, left = list(sizes), waiting
    for slot in (0, 1):
        share = admission_share(now, slot, left)
        assert 0 <= share <= left
        now[slot] += share
        left -= share
    assert left == 0
    assert abs(now[0] - now[1]) <= max(1, abs(sizes[0] - sizes[1]) - waiting)


@given(st.integers(0, 40), st.integers(0, 40))
def test_one_slot_takes_everybody(running: int, waiting: int) -> None:
    assert admission_share([running], 0, waiting) == waiting


@given(SIZES, st.integers(2, 6), st.integers(2, 6))
def test_moves_settle(sizes: tuple[int, int], min_parallel: int, threshold: int) -> None:
    """A move is possible, and one move is enough: no request goes back and forth."""
    move = plan_move(sizes, min_parallel, threshold)
    if move is None:
        return
    assert {move.source, move.target} == {0, 1}
    assert 0 < move.count <= sizes[move.source]
    after = list(sizes)
    after[move.source] -= move.count
    after[move.target] += move.count
    assert plan_move(after, min_parallel, threshold) is None


@given(SIZES)
def test_small_loads_share_one_slot(sizes: tuple[int, int]) -> None:
    """With too few requests for two slots one of them is emptied."""
    move = plan_move(sizes, min_parallel=100, threshold=2)
    after = list(sizes)
    if move is not None:
        after[move.source] -= move.count
        after[move.target] += move.count
    assert 0 in after


def test_one_slot_never_moves() -> None:
    assert plan_move([9], 2, 2) is None
    assert plan_move([3, 0], 2, 2) == Move(0, 1, 1)
    assert plan_move([1, 0], 2, 2) is None
