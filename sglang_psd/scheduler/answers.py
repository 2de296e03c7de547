"""What goes to the drafter and comes back, as a round uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_psd.channel.messages import DraftRow, RoundRow


@dataclass(frozen=True)
class DraftAnswer:
    """Timing of one ``Proposals`` message (seconds, one clock)."""

    round_id: int
    rids: list[str]
    sent_s: float
    received_s: float
    started_s: float
    finished_s: float


@dataclass
class Taken:
    """Drafts for one verify.

    ``rows[i]`` is None where there are none; ``late`` counts rows that were asked for and did not come in time.
    """

    rows: list[DraftRow | None]
    late: int = 0
    wait_s: float = 0.0
    draft_start_s: float | None = None
    draft_end_s: float | None = None

    def add(self, index: int, row: DraftRow, answer: DraftAnswer) -> None:
        """Note drafts for request ``index`` and when they were made."""
        self.rows[index] = row
        start, end = self.draft_start_s, self.draft_end_s
        self.draft_start_s = answer.started_s if start is None else min(start, answer.started_s)
        self.draft_end_s = answer.finished_s if end is None else max(end, answer.finished_s)


def without_twins(rows: Sequence[RoundRow]) -> tuple[list[RoundRow], list[str]]:
    """Rows whose id occurs once, and the ids that occur more often.

    Two live requests under one id cannot be told apart by the drafter: neither is drafted.
    """
    counts = Counter(row.rid for row in rows)
    return [row for row in rows if counts[row.rid] == 1], sorted(rid for rid in counts if counts[rid] > 1)
