"""The scheduler's view of the drafter: what is open, what is asked for, what has arrived.

Pure bookkeeping over a channel; neither torch nor SGLang. On tensor-parallel ranks other than 0 there is no drafter:
``drafting.py`` broadcasts what rank 0 took.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from sglang_psd.channel.checks import check_open
from sglang_psd.channel.draft_rows import ProposalTable
from sglang_psd.channel.messages import (
    TOKEN,
    Close,
    Credit,
    Failure,
    Features,
    Load,
    Loaded,
    Message,
    Open,
    Ping,
    Proposals,
    Reset,
    Round,
    RoundRow,
    Sampling,
    Stats,
)
from sglang_psd.drafter.process import ALIVE_SLICE_S, DrafterProcess
from sglang_psd.errors import ProtocolError
from sglang_psd.scheduler.answers import Arrival, DraftAnswer, Taken, without_twins
from sglang_psd.scheduler.link import DrafterLink
from sglang_psd.scheduler.orders import Orders
from sglang_psd.scheduler.vitals import Vitals

logger = logging.getLogger(__name__)

KEPT_ROUNDS = 1024
# Step of a wait that also watches the target: a fraction of a handoff's budget.
WATCH_SLICE_S = 50e-6


class DraftClient:
    """Sends commits, collects proposals.

    Parameters
    ----------
    process : DrafterProcess
        Joined or joining; only its ``channel`` and ``alive`` are used.
    num_steps, vocab_limit : int
        Drafts per request and round; token ids from here on are never proposed.
    vitals : Vitals
        Decides how long to wait and when the drafter is lost.
    on_answer : callable
        Called with each ``DraftAnswer``.
    """

    def __init__(
        self,
        process: DrafterProcess,
        num_steps: int,
        vocab_limit: int,
        vitals: Vitals,
        on_answer: Callable[[DraftAnswer], None],
    ):
        self._link = DrafterLink(process, num_steps, vocab_limit)
        self._num_steps = num_steps
        self._vocab_limit = vocab_limit
        self._vitals = vitals
        self._on_answer = on_answer
        self._open: set[str] = set()
        self._orders = Orders(num_steps)
        self._sent_s: dict[int, float] = {}
        self._next_round = 0
        self.stats: Stats | None = None
        self._loaded: Loaded | None = None  # answer to the last ``Load``
        self._audit: tuple[int, int] | None = None  # number of the open ping, requests open when it was sent
        self.resyncs = 0
        self.reopened = 0
        self.on_credit: Callable[[int], None] = lambda end: None

    @property
    def failure(self) -> str | None:
        """Why the drafter is lost; None while it is not."""
        return self._link.failure

    @property
    def usable(self) -> bool:
        """Whether the drafter is there at all."""
        return self._link.failure is None

    @property
    def drafting(self) -> bool:
        """Whether rounds can expect drafts now."""
        return self.usable and not self._vitals.late and not self._vitals.silent

    @property
    def open_requests(self) -> int:
        """Requests the drafter holds."""
        return len(self._open)

    def is_open(self, rid: str) -> bool:
        """Whether the drafter knows the request."""
        return rid in self._open

    # --- requests -------------------------------------------------------------------------------

    def open(self, rid: str, token_ids: Sequence[int], sampling: Sampling) -> bool:
        """Hand a request over; an open one is replaced.

        Returns False for one that no drafter would take: it stays here, and need not be tried again.
        """
        self._forget(rid)
        tokens = np.asarray(token_ids)
        if int(tokens.max()) >= self._vocab_limit:
            return False
        message = Open(rid, tokens.astype(TOKEN).tobytes(), sampling)
        try:
            check_open(message)
        except ProtocolError:
            return False
        if self._send(message):
            self._open.add(rid)
            return True
        return not self.usable  # the next drafter may take it; this one never will

    def commit(self, rows: Sequence[RoundRow]) -> float:
        """Report committed tokens and ask for the next drafts. Returns when it was sent (seconds)."""
        now = time.monotonic()
        if max(chain.from_iterable([row.new_tokens for row in rows]), default=0) >= self._vocab_limit:
            self.close([row.rid for row in rows if max(row.new_tokens, default=0) >= self._vocab_limit])
        rows, twins = without_twins([row for row in rows if row.rid in self._open])
        if twins:
            self.close(twins)
        if not rows:
            return now
        round_id = self._next_round
        self._next_round += 1
        if self._send(Round(round_id, rows, self._num_steps)):
            self._sent_s[round_id] = now
            self._sent_s.pop(round_id - KEPT_ROUNDS, None)
            self._orders.place(rows)
        return now

    def tell(self, message: Features) -> None:
        """Say what the mailbox holds."""
        self._send(message)

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

    def reset(self) -> None:
        """Start over: every request is opened again, with all its tokens, when it comes by."""
        self._clear()
        self._send(Reset())

    def load(self, path: str, patience_s: float) -> str | None:
        """Let the drafter take new weights, and wait for it; requests are opened again when they come by.

        Returns why it drafts with the old ones, if it does.
        """
        self._clear()
        self._loaded = None
        deadline = time.monotonic() + patience_s
        self._send(Load(path))
        while self.usable and self._loaded is None:
            if time.monotonic() > deadline:
                self._fail(f"it did not take new weights within {patience_s:.0f} s")
            elif not self._receive_one(ALIVE_SLICE_S) and not self._link.alive():
                self._fail("its process has ended")
        return self._loaded.error if self._loaded is not None else "the drafter was lost meanwhile."

    def take(self, wanted: Sequence[tuple[str, int, int] | None], watch: Callable[[], bool] | None = None) -> Taken:
        """Collect drafts for one verify, waiting for those that are on their way.

        Parameters
        ----------
        wanted : sequence of (rid, base_len, limit) or None
            One entry per request: its committed length and how many drafts it can use at most. None: no drafts wanted.
        watch : callable, optional
            Called while waiting; returns whether there is something to watch for. The wait is then made of short steps.
        """
        started = time.monotonic()
        expected = self._orders.expected(wanted)
        if expected:
            self._wait_for(expected, started + self._vitals.patience_s, watch)
        wait_s = time.monotonic() - started
        taken = self._orders.take(wanted, expected)
        taken.wait_s = wait_s
        if taken.late and self.usable and self._vitals.waited_in_vain():
            logger.warning(
                "PSD: the drafter did not answer within %.1f s; rounds run without drafts until it does.", taken.wait_s
            )
        return taken

    def poll(self) -> None:
        """Read what has arrived without waiting."""
        self._wait_for(set(), 0.0)

    def _wait_for(self, rids: set[str], deadline: float, watch: Callable[[], bool] | None = None) -> None:
        while self.usable and self._receive_one(0.0):
            pass
        awaited = self._orders.await_all(rids)
        while self.usable and awaited:
            left = deadline - time.monotonic()
            if left <= 0 or self._vitals.silent:
                return
            if watch is not None and watch():
                if not self._receive_one(0.0) and not self._link.spins:
                    time.sleep(WATCH_SLICE_S)
            elif not self._receive_one(min(left, ALIVE_SLICE_S)) and not self._link.alive():
                self._fail("its process has ended")

    def tend(self, known: Callable[[], set[str]] | None = None) -> None:
        """Once a turn: read what has come, notice a drafter that died or hangs, and compare notes now and then.

        ``known`` gives the ids of all requests that the scheduler still has: others are closed before notes are
        compared.
        """
        if not self.usable:
            return
        self.poll()
        reason = self._vitals.verdict()
        if not self._link.alive():
            reason = "its process has ended"
        if reason is not None and self.usable:
            self._fail(reason)
        elif self._vitals.ping_due():
            if known is not None:
                self.close(list(self._open - known()))
            self.ping()

    def give_up(self, reason: str) -> None:
        """Stop drafting: whoever calls this knows why."""
        if self.usable:
            self._fail(reason)

    def ping(self) -> int:
        """Ask for the drafter's accounting; the answer ends up in ``stats``. Returns the number that it will bear."""
        number = self._vitals.pinged()
        self._audit = (number, len(self._open))
        self._send(Ping(number))
        return number

    def _compare(self, stats: Stats) -> None:
        """Messages keep their order: at a ping both sides hold the same requests, or a message was lost."""
        self.stats = stats
        self._vitals.ponged(stats.ping_id)
        if stats.fault is not None:
            self._fail(f"its accounting is broken: {stats.fault}")
        elif self._audit is not None and self._audit[0] == stats.ping_id and self._audit[1] != stats.open_requests:
            logger.warning(
                "PSD: the drafter holds %d requests instead of %d; all are handed to it again.",
                stats.open_requests,
                self._audit[1],
            )
            self.resyncs += 1
            self.reset()

    def _receive_one(self, timeout_s: float) -> bool:
        message = self._link.receive(timeout_s)
        if isinstance(message, Proposals):
            self._accept(message)
        elif isinstance(message, Credit):
            self.on_credit(message.end)
        elif isinstance(message, Loaded):
            self._loaded = message
        elif isinstance(message, Stats):
            self._compare(message)
        elif isinstance(message, Failure):
            if message.fatal:
                self._fail(message.message)
            else:
                logger.warning("PSD: the drafter reports: %s", message.message)
        elif message is None and not self.usable:
            self._clear()
        return message is not None

    def _accept(self, message: Proposals) -> None:
        received_s = time.monotonic()
        sent_s = self._sent_s.get(message.round_id, message.received_s)
        answer = DraftAnswer(message.round_id, message.rids, sent_s, received_s, message.started_s, message.finished_s)
        arrival = Arrival(ProposalTable(message), answer)
        for index in message.unknown:
            rid = message.rids[index]
            if self._orders.is_for(rid, message.base_lens[index]) and rid in self._open:
                # No longer open: ``DraftingMixin._psd_open`` hands it over again, with all its tokens.
                self._open.discard(rid)
                self.reopened += 1
        fits = self._orders.deliver(arrival)
        self._vitals.answered(received_s - sent_s, fits)
        self._on_answer(answer)

    def _forget(self, rid: str) -> None:
        self._open.discard(rid)
        self._orders.forget(rid)

    def _clear(self) -> None:
        self._open.clear()
        self._orders.clear()

    def _send(self, message: Message) -> bool:
        sent = self._link.send(message)
        if not self.usable:
            self._clear()
        return sent

    def _fail(self, reason: str) -> None:
        """The drafter is lost: every request goes on without drafts."""
        self._link.fail(reason)
        self._clear()
