"""Requests that have ended, kept for the KV of their beginnings.

Where the target finds a prompt's beginning in its prefix cache it computes no hidden states for it. The head's own KV
for the same tokens is what it needs of them, and it is small: one layer. So the KV of ended requests stays in the pool
until somebody needs the room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

from sglang_psd.drafter.head_rows import HeadState


class EndedRequests:
    """A cache bounded by the pool, oldest out first.

    Parameters
    ----------
    release : callable
        Gives a request's KV back.
    """

    def __init__(self, release: Callable[[HeadState], None]):
        self._release = release
        self._kept: list[HeadState] = []

    @property
    def slots(self) -> int:
        """KV slots held here; they can be had back at any time."""
        return sum(state.num_slots for state in self._kept)

    @property
    def states(self) -> list[HeadState]:
        """Oldest first."""
        return list(self._kept)

    def keep(self, state: HeadState, most_waiting: int) -> None:
        """Take over a request that is closed, if it has KV.

        Hidden states of its last round, at most ``most_waiting``, are kept too: they are fed when they are wanted.
        """
        state.tokens.extend(state.ahead)
        state.ahead = []
        if state.feedable > most_waiting:
            state.keep_below(state.start + state.fed)
        state.own_waiting()
        if state.fed:
            self._kept.append(state)
        else:
            self._release(state)

    def evict(self) -> bool:
        """Release the oldest; False when there is none."""
        if not self._kept:
            return False
        self._release(self._kept.pop(0))
        return True

    def clear(self) -> None:
        """Release all."""
        while self.evict():
            pass

    def find(self, state: HeadState, length: int, running: Iterable[HeadState]) -> tuple[HeadState, int] | None:
        """A request, ended or ``running``, that has most of the first ``length`` positions of ``state``.

        A position is fed with the token after it, so its KV is of use where one token more agrees.

        Returns
        -------
        (HeadState, int) or None
            The request, and the position before which its KV is that of ``state``.
        """
        best, most = None, 0
        for other in chain(reversed(self._kept), running):
            usable = min(length, other.start + other.known)
            if other is state or usable < other.solid or usable - other.start <= most:
                continue  # it could not be better, whatever its tokens are
            usable = min(usable, common_beginning(state.tokens, other.tokens, usable + 1) - 1)
            if usable >= other.solid and usable - other.start > most:
                best, most = (other, usable), usable - other.start
        return best

    @contextmanager
    def in_use(self, state: HeadState) -> Iterator[None]:
        """``state`` is not evicted within; if it is kept here, it counts as the most recent one then."""
        kept = any(other is state for other in self._kept)
        self._kept = [other for other in self._kept if other is not state]
        try:
            yield
        finally:
            if kept:
                self._kept.append(state)


def common_beginning(one: list[int], other: list[int], limit: int) -> int:
    """How many tokens two sequences begin with alike, ``limit`` at most."""
    low, high = 0, min(len(one), len(other), limit)
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # equal below ``low``, different below ``high``
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
