"""How much of the drafter's work happened while the target worked: pure interval arithmetic."""

from __future__ import annotations

from collections import deque

Interval = tuple[float, float]

# Intervals kept on either side; rounds are settled within a few turns.
KEPT = 256
# Answers of the drafter that the overlap fraction looks back on.
WINDOW = 128


def overlap_s(interval: Interval, others: list[Interval] | deque[Interval]) -> float:
    """Seconds of ``interval`` covered by ``others``, which do not overlap each other."""
    start, end = interval
    return sum(max(0.0, min(end, right) - max(start, left)) for left, right in others)


class OverlapMeter:
    """Collects verify and draft intervals (seconds, one clock) and adds up their intersection.

    A draft interval is settled once a verify that ends after it is known: before that its cover may still grow.
    """

    def __init__(self) -> None:
        self._verifies: deque[Interval] = deque(maxlen=KEPT)
        self._open_drafts: deque[Interval] = deque(maxlen=KEPT)
        # (drafting, of it overlapped) in seconds; a window, so that compilations at the start do not count for ever.
        self._settled: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def add_draft(self, start: float, end: float) -> None:
        """Note that the drafter worked from ``start`` to ``end``."""
        if end > start:
            self._open_drafts.append((start, end))

    def add_verify(self, start: float, end: float) -> None:
        """Note that the target worked from ``start`` to ``end``; settle the drafts before it."""
        if end > start:
            self._verifies.append((start, end))
        while self._open_drafts and self._open_drafts[0][1] <= end:
            draft = self._open_drafts.popleft()
            self._settled.append((draft[1] - draft[0], overlap_s(draft, self._verifies)))

    @property
    def fraction(self) -> float:
        """Share of the drafting time of the last ``WINDOW`` answers in which the target worked, in [0, 1]."""
        return min(1.0, self.overlapped_s / self.draft_s) if self.draft_s else 0.0

    @property
    def draft_s(self) -> float:
        """Drafting time of the window."""
        return sum(draft for draft, _ in self._settled)

    @property
    def overlapped_s(self) -> float:
        """How much of it the target worked."""
        return sum(covered for _, covered in self._settled)
