"""Keeps one process at hand that can become the drafter at once. Never blocks; neither torch nor SGLang."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sglang_psd.drafter.standby import StandbyProcess

logger = logging.getLogger(__name__)

# A standby that ended by itself is started again after this long, or after the next loss: what ended it may be gone.
RETRY_S = 60.0


class StandbyKeeper:
    """Starts a standby, hands it out, and ends it.

    Parameters
    ----------
    start : callable
        Starts a standby process and returns at once.
    clock : callable
        Seconds, monotonic.
    """

    def __init__(self, start: Callable[[], StandbyProcess], clock: Callable[[], float] = time.monotonic):
        self._start = start
        self._clock = clock
        self._process: StandbyProcess | None = None
        self._not_before_s = 0.0
        self._stopped = False

    @property
    def state(self) -> str:
        """``ready``, ``importing``, ``none`` (at the moment) or ``off``."""
        if self._stopped:
            return "off"
        if self._process is None:
            return "none"
        return "ready" if self._process.ready else "importing"

    def tend(self) -> None:
        """Once a turn while the drafter is up: see that there is a standby."""
        if self._process is not None and self._process.exit_code is not None:
            self._missed(f"it ended with code {self._process.exit_code}")
        if self._process is None and not self._stopped and self._clock() >= self._not_before_s:
            try:
                self._process = self._start()
            except OSError as error:
                self._missed(str(error))

    def take(self) -> StandbyProcess | None:
        """A standby that is ready, for its taker to keep; None when there is none.

        One that still imports stays, and is there for the next loss.
        """
        process, self._not_before_s = self._process, 0.0
        if process is None or not process.ready:
            logger.info("PSD: no standby is ready (%s); a new process has to import everything first.", self.state)
            return None
        self._process = None
        return process

    def stop(self) -> None:
        """End the standby and start none any more."""
        self._stopped = True
        self._end()

    def _missed(self, reason: str) -> None:
        logger.warning("PSD: there is no standby for the drafter (%s); next attempt in %.0f s.", reason, RETRY_S)
        self._end()
        self._not_before_s = self._clock() + RETRY_S

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None
