"""Is the drafter well, and how long may a round wait for it? Pure state over a clock; neither torch nor SGLang.

Three signs, from quick to thorough: the *pulse* says that the process runs, an *answer* in time says that it keeps up,
a *pong* says that its main loop gets through what it was sent. Without the first two rounds stop waiting; without the
last the process is given up.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

# Answer times that the deadline looks back on, and how many it needs.
RECENT_ANSWERS = 64
ENOUGH_ANSWERS = 16
# Where no timeout is configured: a round waits this many times the usual answer, between these bounds.
PATIENCE = 20.0
SHORTEST_WAIT_S = 1.0
LONGEST_WAIT_S = 10.0
# A drafter without a sign of life for this long is not waited for.
SILENT_AFTER_S = 0.8
PING_EVERY_S = 2.0


class Vitals:
    """What is known of one drafter process.

    Parameters
    ----------
    timeout_s : float or None
        Longest wait of a round; None: from the usual answer time.
    hung_after_s : float
        Longest time a ping may stay unanswered.
    warm_up_s : float
        The same before the first answer: kernels may be compiled then.
    silence_s : callable
        Seconds since the last sign of life.
    clock : callable
        Seconds, monotonic.
    """

    def __init__(
        self,
        timeout_s: float | None,
        hung_after_s: float = float("inf"),
        warm_up_s: float = float("inf"),
        silence_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._timeout_s = timeout_s
        self._hung_after_s = hung_after_s
        self._warm_up_s = warm_up_s
        self._silence_s = silence_s
        self._clock = clock
        self._answers_s: deque[float] = deque(maxlen=RECENT_ANSWERS)
        self._answered = False
        self._late = False
        self._late_ping = 0  # a pong from here on says that it has caught up
        self._next_ping = 0
        self._pinged_s = clock()
        self._unanswered_since_s: float | None = None

    # --- how long to wait -----------------------------------------------------------------------

    @property
    def timeout_s(self) -> float:
        """Longest wait of a round whose drafter is well."""
        if self._timeout_s is not None:
            return self._timeout_s
        if len(self._answers_s) < ENOUGH_ANSWERS:
            return LONGEST_WAIT_S
        usual = statistics.median(self._answers_s)
        return min(LONGEST_WAIT_S, max(SHORTEST_WAIT_S, PATIENCE * usual))

    @property
    def silent(self) -> bool:
        """Whether the process gives no sign of life."""
        return self._silence_s() > SILENT_AFTER_S

    @property
    def late(self) -> bool:
        """Whether a round waited in vain, and nothing has come since."""
        return self._late

    @property
    def patience_s(self) -> float:
        """How long a round may wait now: a drafter that let one wait in vain does not get to do it again."""
        return 0.0 if self._late or self.silent else self.timeout_s

    # --- what happened --------------------------------------------------------------------------

    def waited_in_vain(self) -> bool:
        """A round goes on without drafts it expected; True when that is news."""
        news, self._late = not self._late, True
        if news:
            self._late_ping = self._next_ping
        return news

    def answered(self, answer_s: float, useful: bool) -> None:
        """Proposals came ``answer_s`` after they were asked for."""
        self._answers_s.append(answer_s)
        self._answered = True
        if useful:
            # A late answer alone ends nothing: the drafter may be working through what it missed.
            self._late = False

    # --- pings ----------------------------------------------------------------------------------

    def ping_due(self) -> bool:
        """Whether to send the next ping: every two seconds, and at once when the drafter was late."""
        after_late = self._late and self._next_ping <= self._late_ping
        return after_late or self._clock() - self._pinged_s >= PING_EVERY_S

    def pinged(self) -> int:
        """Number of the ping that is sent now."""
        self._pinged_s = self._clock()
        if self._unanswered_since_s is None:
            self._unanswered_since_s = self._pinged_s
        self._next_ping += 1
        return self._next_ping - 1

    def ponged(self, ping_id: int) -> None:
        """A ping was answered; one that got lost on the way is forgotten with it."""
        self._unanswered_since_s = None
        if self._late and ping_id >= self._late_ping:
            self._late = False

    def verdict(self) -> str | None:
        """Why the process is to be given up; None while it is not."""
        if self._unanswered_since_s is None:
            return None
        # A stopped process compiles nothing: it gets no time to warm up.
        limit_s = self._hung_after_s if self._answered or self.silent else self._warm_up_s
        waiting_s = self._clock() - self._unanswered_since_s
        return f"it has not answered for {waiting_s:.0f} s" if waiting_s > limit_s else None
