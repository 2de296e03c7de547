"""The scheduler's view of the drafter: what is open, what is asked for, what has arrived.

Pure bookkeeping over a channel; neither torch nor SGLang. On tensor-parallel ranks other than 0 there is no drafter:
``drafting.py`` broadcasts what rank 0 took.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_psd.channel.messages import (
    TOKEN,
    Close,
    DraftRow,
    Failure,
    Open,
    Ping,
    Proposals,
    Round,
    RoundRow,
    Sampling,
    Stats,
    unpack_rows,
)
from sglang_psd.drafter.process import ALIVE_SLICE_S, DrafterProcess
from sglang_psd.errors import ProtocolError

logger = logging.getLogger(__name__)

KEPT_ROUNDS = 1024
# Step of a wait that also watches the target: a fraction of a handoff's budget.
WATCH_SLICE_S = 50e-6


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


class DraftClient:
    """Sends commits, collects proposals.

    Parameters
    ----------
    process : DrafterProcess
        Joined or joining; only its ``channel`` and ``alive`` are used.
    num_steps : int
        Drafts per request and round.
    timeout_s : float
        Longest wait of one ``take``.
    on_answer : callable
        Called with each ``DraftAnswer``.
    """

    def __init__(
        self,
        process: DrafterProcess,
        num_steps: int,
        timeout_s: float,
        on_answer: Callable[[DraftAnswer], None],
    ):
        self._process = process
        self._channel = process.channel
        self._num_steps = num_steps
        self._timeout_s = timeout_s
        self._on_answer = on_answer
        self._open: set[str] = set()
        self._asked: dict[str, int] = {}  # rid -> base_len of the proposals on their way
        self._arrived: dict[str, tuple[DraftRow, DraftAnswer]] = {}
        self._sent_s: dict[int, float] = {}
        self._next_round = 0
        self._stats: Stats | None = None
        self._stalled = False
        self._stalled_since_s = 0.0
        self.failure: str | None = None

    @property
    def usable(self) -> bool:
        """Whether the drafter can be expected to answer."""
        return self.failure is None

    @property
    def open_requests(self) -> int:
        """Requests the drafter holds."""
        return len(self._open)

    def is_open(self, rid: str) -> bool:
        """Whether the drafter knows the request."""
        return rid in self._open

    def open(self, rid: str, token_ids: Sequence[int], sampling: Sampling) -> None:
        """Hand a request over; an open one is replaced."""
        self._forget(rid)
        if self._send(Open(rid, np.asarray(token_ids, TOKEN).tobytes(), sampling)):
            self._open.add(rid)

    def commit(self, rows: Sequence[RoundRow]) -> float:
        """Report committed tokens and ask for the next drafts. Returns when it was sent (seconds)."""
        now = time.monotonic()
        rows = [row for row in rows if row.rid in self._open]
        if not rows:
            return now
        round_id = self._next_round
        self._next_round += 1
        if self._send(Round(round_id, list(rows), self._num_steps)):
            self._sent_s[round_id] = now
            self._sent_s.pop(round_id - KEPT_ROUNDS, None)
            for row in rows:
                self._asked[row.rid] = row.base_len
                self._arrived.pop(row.rid, None)
        return now

    def close(self, rids: Sequence[str]) -> None:
        """Let the drafter forget requests; unknown ones are ignored."""
        known = [rid for rid in rids if rid in self._open]
        for rid in known:
            self._forget(rid)
        if known:
            self._send(Close(known))

    def close_all(self) -> None:
        """Let the drafter forget everything: the server is idle."""
        self.close(list(self._open))

    def take(self, wanted: Sequence[tuple[str, int, int] | None], watch: Callable[[], bool] | None = None) -> Taken:
        """Collect drafts for one verify, waiting for those that are on their way.

        Parameters
        ----------
        wanted : sequence of (rid, base_len, limit) or None
            One entry per request: its committed length and how many drafts it can use at most. None: no drafts wanted.
        watch : callable, optional
            Called while waiting; returns whether there is something to watch for. The wait is then made of short steps.
        """
        started, was_stalled = time.monotonic(), self._stalled
        expected = {item[0] for item in wanted if item is not None and self._asked.get(item[0]) == item[1]}
        # A drafter that let one round wait for nothing does not get to do it again before it has answered.
        self._wait_for(expected, started + (0.0 if self._stalled else self._timeout_s), watch)
        taken = Taken(rows=[None] * len(wanted), wait_s=time.monotonic() - started)
        for i, item in enumerate(wanted):
            if item is not None and item[0] in expected:
                self._pick(taken, i, *item)
        if taken.late and self.usable and not was_stalled:
            self._stalled, self._stalled_since_s = True, time.monotonic()
            logger.warning(
                "PSD: the drafter did not answer within %.1f s; rounds run without drafts until it does.",
                self._timeout_s,
            )
        return taken

    def _pick(self, taken: Taken, index: int, rid: str, base_len: int, limit: int) -> None:
        self._asked.pop(rid, None)
        found = self._arrived.pop(rid, None)
        if found is None:
            taken.late += 1
            return
        row, answer = found
        if row.base_len != base_len or not len(row.tokens) or limit < 1:
            return
        if limit < len(row.tokens):
            law = row.law_ids is not None and row.law_probs is not None
            row = DraftRow(
                base_len,
                row.tokens[:limit],
                row.law_ids[:limit] if law else None,  # type: ignore[index]
                row.law_probs[:limit] if law else None,  # type: ignore[index]
            )
        taken.rows[index] = row
        start, end = taken.draft_start_s, taken.draft_end_s
        taken.draft_start_s = answer.started_s if start is None else min(start, answer.started_s)
        taken.draft_end_s = answer.finished_s if end is None else max(end, answer.finished_s)

    def poll(self) -> None:
        """Read what has arrived without waiting."""
        self._wait_for(set(), 0.0)

    def ping(self, timeout_s: float = 5.0) -> Stats | None:
        """Ask the drafter for its accounting; None when it does not answer in time."""
        self._stats = None
        deadline = time.monotonic() + timeout_s
        if not self._send(Ping(self._next_round)):
            return None
        while self._stats is None and self.usable and time.monotonic() < deadline:
            self._receive_one(ALIVE_SLICE_S)
        return self._stats

    # --- inside ---------------------------------------------------------------------------------

    def _wait_for(self, rids: set[str], deadline: float, watch: Callable[[], bool] | None = None) -> None:
        while self.usable and self._receive_one(0.0):
            pass
        while self.usable and not rids <= self._arrived.keys():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if watch is not None and watch():
                if not self._receive_one(0.0):
                    time.sleep(WATCH_SLICE_S)
            elif not self._receive_one(min(left, ALIVE_SLICE_S)) and not self._process.alive():
                self._fail("its process has ended")

    def _receive_one(self, timeout_s: float) -> bool:
        try:
            message = self._channel.receive(timeout_s)
        except ProtocolError as error:
            logger.warning("PSD: %s", error)
            return True
        if message is None:
            return False
        if isinstance(message, Proposals):
            self._accept(message)
        elif isinstance(message, Stats):
            self._stats = message
        elif isinstance(message, Failure):
            if message.fatal:
                self._fail(message.message)
            else:
                logger.warning("PSD: the drafter reports: %s", message.message)
        return True

    def _accept(self, message: Proposals) -> None:
        received_s = time.monotonic()
        sent_s = self._sent_s.get(message.round_id, message.received_s)
        answer = DraftAnswer(message.round_id, message.rids, sent_s, received_s, message.started_s, message.finished_s)
        for rid, row in unpack_rows(message).items():
            if self._asked.get(rid) == row.base_len:
                # Only an answer that is of use ends a stall: a drafter may be working through what it missed.
                self._arrived[rid], self._stalled = (row, answer), False
        self._on_answer(answer)

    def _forget(self, rid: str) -> None:
        self._open.discard(rid)
        self._asked.pop(rid, None)
        self._arrived.pop(rid, None)

    def _send(self, message) -> bool:
        if not self.usable:
            return False
        try:
            self._channel.send(message)
        except ProtocolError as error:
            self._fail(str(error))
            return False
        return True

    def check_alive(self, hung_after_s: float = float("inf")) -> None:
        """Notice a drafter that died while nothing was asked of it, or that has not answered for too long."""
        if not self.usable:
            return
        if not self._process.alive():
            self._fail("its process has ended")
        elif self._stalled and time.monotonic() - self._stalled_since_s > hung_after_s:
            self._fail(f"it has not answered for {hung_after_s:.0f} s")

    def _fail(self, reason: str) -> None:
        """The drafter is lost: every request goes on without drafts."""
        self.failure = reason
        self._open.clear()
        self._asked.clear()
        self._arrived.clear()
        logger.error("PSD: the drafter is lost (%s); serving goes on without drafts.", reason)
