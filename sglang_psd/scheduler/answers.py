"""What comes back from the drafter, as a round uses it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_psd.channel.messages import DraftRow


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
