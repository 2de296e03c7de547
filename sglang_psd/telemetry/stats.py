"""Running figures of a PSD server, as ``/server_info`` shows them."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from sglang_psd.telemetry.intervals import OverlapMeter

RECENT = 512


@dataclass(frozen=True)
class RoundRecord:
    """One verify of one slot. Times in seconds of ``time.monotonic``; None where nothing was drafted.

    Attributes
    ----------
    slot, mode : int, str
    sizes : tuple of int
        Running requests of each slot at launch.
    rids : list of str
    num_steps : int
        Drafts asked for per request (k).
    verified, accepted, emitted : int
        Drafts that went into the verify, drafts accepted, tokens committed (bonus included).
    rows_with_drafts, late_rows : int
        Requests that had drafts; requests whose drafts were expected but not there in time.
    wait_s : float
        How long the launch waited for proposals.
    launch_s, verify_start_s, verify_end_s, result_s : float
        Host launch; begin and end of the target's forward and acceptance; result seen by the host.
    commit_s : float
        When the round's commit left for the drafter.
    draft_start_s, draft_end_s : float or None
        First begin and last end of the drafting that this verify used.
    preempted : list of str
        Requests retracted since the last round.
    """

    slot: int
    mode: str
    sizes: tuple[int, ...]
    rids: list[str]
    num_steps: int
    verified: int
    accepted: int
    emitted: int
    rows_with_drafts: int
    late_rows: int
    wait_s: float
    launch_s: float
    verify_start_s: float
    verify_end_s: float
    result_s: float
    commit_s: float
    draft_start_s: float | None
    draft_end_s: float | None
    preempted: list[str]


@dataclass
class PSDStats:
    """Totals since the start or the last flush of the cache, and medians over the last rounds."""

    rounds: int = 0
    requests_verified: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    late_rows: int = 0
    retractions: int = 0
    moves: int = 0
    overlap: OverlapMeter = field(default_factory=OverlapMeter)
    _verify_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _draft_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _to_drafter_us: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _to_target_us: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _bubble_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _drafter_bubble_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _last_verify_end_s: float = 0.0
    _last_draft_end_s: float = 0.0

    def add_round(self, record: RoundRecord) -> None:
        """Count one round."""
        self.rounds += 1
        self.requests_verified += len(record.rids)
        self.verified += record.verified
        self.accepted += record.accepted
        self.emitted += record.emitted
        self.late_rows += record.late_rows
        self.retractions += len(record.preempted)
        self._verify_ms.append((record.verify_end_s - record.verify_start_s) * 1e3)
        if record.draft_end_s is not None:
            self._to_target_us.append(max(0.0, record.launch_s - record.draft_end_s) * 1e6)
        if self._last_verify_end_s:
            self._bubble_ms.append(max(0.0, record.verify_start_s - self._last_verify_end_s) * 1e3)
        self._last_verify_end_s = record.verify_end_s
        self.overlap.add_verify(record.verify_start_s, record.verify_end_s)

    def add_draft(self, sent_s: float, started_s: float, finished_s: float) -> None:
        """Count one answer of the drafter (``sent_s``: when its commit left)."""
        self._draft_ms.append((finished_s - started_s) * 1e3)
        self._to_drafter_us.append(max(0.0, started_s - sent_s) * 1e6)
        if self._last_draft_end_s:
            self._drafter_bubble_ms.append(max(0.0, started_s - self._last_draft_end_s) * 1e3)
        self._last_draft_end_s = finished_s
        self.overlap.add_draft(started_s, finished_s)

    def pause(self) -> None:
        """The server is idle: the next gaps are no bubbles."""
        self._last_verify_end_s = self._last_draft_end_s = 0.0

    def summary(self) -> dict[str, float | int]:
        """Figures with units in their names; medians over the last 512 rounds."""
        return {
            "rounds": self.rounds,
            "accept_length": _ratio(self.emitted, self.requests_verified),
            "accept_rate": _ratio(self.accepted, self.verified),
            "drafts_verified": self.verified,
            "drafts_accepted": self.accepted,
            "late_rows": self.late_rows,
            "retractions": self.retractions,
            "slot_moves": self.moves,
            "verify_ms": _median(self._verify_ms),
            "draft_ms": _median(self._draft_ms),
            "handoff_to_drafter_us": _median(self._to_drafter_us),
            "handoff_to_target_us": _median(self._to_target_us),
            "target_bubble_ms": _median(self._bubble_ms),
            "drafter_bubble_ms": _median(self._drafter_bubble_ms),
            "overlap_fraction": round(self.overlap.fraction, 4),
        }


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _median(values: deque[float]) -> float:
    return round(statistics.median(values), 4) if values else 0.0
