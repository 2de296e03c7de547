"""What goes to the drafter and comes back, as a round uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_psd.channel.draft_rows import DraftBatch, DraftRow, ProposalTable
from sglang_psd.channel.messages import RoundRow


@dataclass(frozen=True)
class DraftAnswer:
    """Timing of one ``Proposals`` message (seconds, one clock)."""

    round_id: int
    rids: list[str]
    sent_s: float
    received_s: float
    started_s: float
    finished_s: float


@dataclass(eq=False)
class Arrival:
    """One message with drafts; ``picks`` are those that a verify takes: place in its batch, row here, most drafts."""

    table: ProposalTable
    answer: DraftAnswer
    picks: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class Taken:
    """Drafts for one verify; ``late`` counts requests whose drafts were asked for and did not come in time."""

    drafts: DraftBatch
    late: int = 0
    wait_s: float = 0.0
    draft_start_s: float | None = None
    draft_end_s: float | None = None

    @property
    def rows(self) -> list[DraftRow | None]:
        """The drafts request by request; None where there are none."""
        return [self.drafts.row(i) for i in range(len(self.drafts))]

    def add(self, arrival: Arrival) -> None:
        """Take a message's picks over, and note when they were made."""
        places, rows, limits = np.array(arrival.picks, dtype=np.int64).T
        arrival.picks = []
        self.drafts.put(places, arrival.table, rows, limits)
        if self.drafts.counts[places].any():
            self._note(arrival)

    @classmethod
    def whole(cls, arrival: Arrival, num_steps: int, limits: Sequence[int]) -> Taken:
        """What a message holds whose rows are the verify's batch."""
        taken = cls(DraftBatch.whole(arrival.table, num_steps, limits))
        if taken.drafts.counts.any():
            taken._note(arrival)
        return taken

    def _note(self, arrival: Arrival) -> None:
        answer, start, end = arrival.answer, self.draft_start_s, self.draft_end_s
        self.draft_start_s = answer.started_s if start is None else min(start, answer.started_s)
        self.draft_end_s = answer.finished_s if end is None else max(end, answer.finished_s)


def without_twins(rows: Sequence[RoundRow]) -> tuple[list[RoundRow], list[str]]:
    """Rows whose id occurs once, and the ids that occur more often.

    Two live requests under one id cannot be told apart by the drafter: neither is drafted.
    """
    if len({row.rid for row in rows}) == len(rows):
        return list(rows), []
    counts = Counter(row.rid for row in rows)
    return [row for row in rows if counts[row.rid] == 1], sorted(rid for rid in counts if counts[rid] > 1)
