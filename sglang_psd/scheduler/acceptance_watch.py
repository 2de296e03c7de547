"""Notices a drafter whose drafts have become worthless: alive, in time, and wrong. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

# Verified drafts per look; with as many, a rate is known to a percent or two.
WINDOW_DRAFTS = 2048
# Requests per look, at least: one alone may ask for texts that no drafter foresees.
LEAST_REQUESTS = 8
# Share of the newest window in the usual rate.
MEMORY = 0.1
# A drafter that was never much better than this cannot collapse.
LEAST_USUAL_RATE = 0.05


class Verdict(Enum):
    """What a window says."""

    FINE = "fine"
    REOPEN = "re-open"
    OFF = "off"


class AcceptanceWatch:
    """Compares the accept rate of each window with the usual one.

    The first collapsed window says ``REOPEN``: the drafter's picture of the requests may be wrong. If the next one is
    no better, the drafts are of no use: ``OFF``.

    Parameters
    ----------
    floor : float
        Share of the usual rate below which a window has collapsed; 0 never finds fault.
    """

    def __init__(self, floor: float):
        self._floor = floor
        self._verified = 0
        self._accepted = 0
        self._rids: set[str] = set()
        self._collapsed = False
        self.usual: float | None = None
        self.latest = 0.0

    def add(self, rids: Iterable[str], verified: int, accepted: int) -> Verdict:
        """Count one round's drafts, of these requests; judges whenever a window is full."""
        self._verified += verified
        self._accepted += accepted
        self._rids.update(rids)
        if self._verified < WINDOW_DRAFTS or len(self._rids) < LEAST_REQUESTS:
            return Verdict.FINE
        self.latest = self._accepted / self._verified
        self._verified = self._accepted = 0
        self._rids.clear()
        return self._judge()

    def _judge(self) -> Verdict:
        if self.usual is None:
            self.usual = self.latest
            return Verdict.FINE
        if self.usual >= LEAST_USUAL_RATE and self.latest < self._floor * self.usual:
            before, self._collapsed = self._collapsed, True
            return Verdict.OFF if before else Verdict.REOPEN
        self._collapsed = False
        self.usual += MEMORY * (self.latest - self.usual)
        return Verdict.FINE
