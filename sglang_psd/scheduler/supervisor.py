"""Brings a lost drafter back: restart with back-off, and a limit after which drafting stays off.

Pure state machine over a clock and a function that spawns; neither torch nor SGLang. It never blocks: the scheduler
calls ``tick`` once per turn.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from sglang_psd.channel.messages import Failure, Hello
from sglang_psd.drafter.process import DrafterProcess
from sglang_psd.drafter.standby import StandbyProcess
from sglang_psd.errors import PSDError
from sglang_psd.scheduler.standby import StandbyKeeper

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.5
# Back-off and the limit look back this far.
LOSS_WINDOW_S = 600.0
# The next attempt waits this long at most for the last process to be gone.
LEAVE_WITHIN_S = 10.0


class DrafterSupervisor:
    """Decides when to spawn a drafter again and says when it is ready.

    Parameters
    ----------
    spawn : callable
        Starts a drafter process, or lets the standby it is given become one, and returns at once.
    start_timeout_s : float
        Longest time from spawn to ready.
    max_losses : int
        This many within ten minutes, and drafting stays off until the server is restarted.
    longest_delay_s : float
        Where the doubling of the delay between attempts ends.
    clock : callable
        Seconds, monotonic.
    standby : StandbyKeeper, optional
        Has a process at hand for the next attempt.
    """

    def __init__(
        self,
        spawn: Callable[[StandbyProcess | None], DrafterProcess],
        start_timeout_s: float,
        max_losses: int = 5,
        longest_delay_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        standby: StandbyKeeper | None = None,
    ):
        self._spawn = spawn
        self._start_timeout_s = start_timeout_s
        self._max_losses = max_losses
        self._longest_delay_s = longest_delay_s
        self._clock = clock
        self._standby = standby
        self._losses: deque[float] = deque(maxlen=max_losses)
        self._due_s: float | None = None
        self._leaving: DrafterProcess | None = None
        self._starting: DrafterProcess | None = None
        self._started_s = 0.0
        self.restarts = 0
        self.given_up = False

    @property
    def standby_state(self) -> str:
        """Of the process that waits to become the next drafter (``StandbyKeeper.state``); ``off`` when none is kept."""
        return "off" if self._standby is None else self._standby.state

    @property
    def state(self) -> str:
        """``up``, ``waiting`` (for the next attempt), ``starting`` or ``given up``."""
        if self.given_up:
            return "given up"
        if self._starting is not None:
            return "starting"
        return "up" if self._due_s is None else "waiting"

    def lost(self, process: DrafterProcess | None = None) -> None:
        """The drafter is gone: schedule the next attempt, or give up.

        A ``process`` that has been killed holds its GPU's memory until the driver has taken it back, which may take a
        second or two. The next one would find no room: it has to wait until this one is reaped.
        """
        now, self._leaving = self._clock(), process
        self._losses.append(now)
        if len(self._losses) == self._max_losses and now - self._losses[0] < LOSS_WINDOW_S:
            self.give_up(f"the drafter was lost {self._max_losses} times within {LOSS_WINDOW_S:.0f} s")
            return
        recent = sum(1 for loss in self._losses if now - loss < LOSS_WINDOW_S)
        delay_s = min(self._longest_delay_s, FIRST_DELAY_S * 2 ** (recent - 1))
        self._due_s = now + delay_s
        logger.warning("PSD: next attempt to start a drafter in %.1f s.", delay_s)

    def give_up(self, reason: str) -> None:
        """Start no drafter any more."""
        self.given_up, self._due_s = True, None
        if self._standby is not None:
            self._standby.stop()
        logger.error("PSD: %s; drafting stays off until the server is restarted.", reason)

    def tick(self) -> DrafterProcess | None:
        """Move on; returns a drafter that has just become ready."""
        if self._starting is not None:
            return self._poll_start(self._starting)
        if self._due_s is not None and self._clock() >= self._due_s and not self._must_wait(self._due_s):
            self._due_s = self._leaving = None
            self._attempt()
        elif self.state == "up" and self._standby is not None:
            self._standby.tend()
        return None

    def stop(self) -> None:
        """End a drafter that is still starting, and the standby."""
        self._end_start()
        if self._standby is not None:
            self._standby.stop()

    def _end_start(self) -> None:
        if self._starting is not None:
            self._starting.abandon()
            self._starting = None

    def _must_wait(self, since_s: float) -> bool:
        leaving = self._leaving
        return leaving is not None and leaving.alive() and self._clock() < since_s + LEAVE_WITHIN_S

    def _attempt(self) -> None:
        standby = None if self._standby is None else self._standby.take()
        try:
            self._starting, self._started_s = self._spawn(standby), self._clock()
            self.restarts += 1
        except (OSError, PSDError) as error:
            if standby is not None:
                standby.end()
            logger.error("PSD: a new drafter could not be started (%s).", error)
            self.lost()

    def _poll_start(self, process: DrafterProcess) -> DrafterProcess | None:
        reason = None
        try:
            message = process.channel.receive(0.0)
        except PSDError as error:
            message, reason = None, str(error)
        if isinstance(message, Hello):
            process.hello, self._starting = message, None
            logger.info("PSD: a new drafter is ready after %.1f s.", self._clock() - self._started_s)
            return process
        if isinstance(message, Failure):
            reason = message.message
        elif not process.can_answer():
            reason = "its socket file was removed" if process.alive() else "its process ended while loading"
        elif self._clock() - self._started_s > self._start_timeout_s:
            reason = f"it was not ready within {self._start_timeout_s:.0f} s"
        if reason is not None:
            logger.error("PSD: a new drafter could not be started (%s).", reason)
            self._end_start()
            self.lost(process)
        return None
