"""Space in the mailbox: nothing unread is ever overwritten."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from sglang_psd.channel.ring import RowRing


def test_runs_follow_each_other_and_wrap() -> None:
    ring = RowRing(10)
    assert ring.reserve(6) == (0, 6)
    assert ring.reserve(4) == (6, 10)
    assert ring.reserve(1) is None
    ring.release(6)
    assert ring.reserve(5) == (0, 15)


def test_a_run_is_not_split() -> None:
    ring = RowRing(10)
    ring.reserve(7)
    ring.release(7)
    assert ring.reserve(4) == (0, 14)  # the last three rows are left out
    ring.release(14)
    assert ring.reserve(10) is None  # it would cover the place where the next row belongs and wrap
    assert ring.reserve(6) == (4, 20)


def test_too_large() -> None:
    assert RowRing(10).reserve(11) is None


def test_credit_beyond_what_was_written_is_cut() -> None:
    ring = RowRing(4)
    ring.reserve(2)
    ring.release(10**9)
    ring.reserve(2)
    assert ring.reserve(3) is None


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=60))
def test_unread_rows_never_overlap(capacity: int, actions: list[tuple[int, bool]]) -> None:
    ring, unread = RowRing(capacity), deque()
    for rows, read_first in actions:
        if read_first and unread:
            ring.release(unread.popleft()[1])
        place = ring.reserve(rows)
        if place is None:
            continue
        taken = set(range(place[0], place[0] + rows))
        assert max(taken) < capacity
        assert all(taken.isdisjoint(other) for other, _ in unread)
        unread.append((taken, place[1]))
    while unread:
        ring.release(unread.popleft()[1])
    start = ring.reserve(1)
    assert start is not None
