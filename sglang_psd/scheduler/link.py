"""The scheduler's end of the wire to one drafter process: sound messages in and out, until it is lost."""

from __future__ import annotations

import logging

from sglang_psd.channel.checks import check_contents
from sglang_psd.channel.messages import Message, Proposals
from sglang_psd.drafter.process import DrafterProcess
from sglang_psd.errors import ChannelDamagedError, ProtocolError, UnsendableError

logger = logging.getLogger(__name__)


class DrafterLink:
    """Sends and receives; remembers why the drafter was lost.

    Parameters
    ----------
    process : DrafterProcess
        Only its ``channel`` and ``alive`` are used.
    num_steps, vocab_limit : int
        Longest chain and first id that may not occur in one: proposals beyond are refused.
    """

    def __init__(self, process: DrafterProcess, num_steps: int, vocab_limit: int):
        self._process = process
        self._num_steps = num_steps
        self._vocab_limit = vocab_limit
        self.failure: str | None = None

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.alive()

    @property
    def spins(self) -> bool:
        """Whether this side has a core to wait with."""
        return self._process.channel.spin_s > 0

    def send(self, message: Message) -> bool:
        """Queue a message, without waiting; False when it did not go. A full queue means that the drafter is lost."""
        if self.failure is not None:
            return False
        try:
            self._process.channel.send(message)
        except UnsendableError as error:
            logger.warning("PSD: %s", error)
            return False
        except ProtocolError as error:
            self.fail(str(error))
            return False
        return True

    def receive(self, timeout_s: float) -> Message | None:
        """Next sound message, or None when none came in time; unsound ones are told and skipped."""
        while True:
            try:
                message = self._process.channel.receive(timeout_s)
                if isinstance(message, Proposals):
                    check_contents(message, self._num_steps, self._vocab_limit)
                return message
            except ChannelDamagedError as error:
                self.fail(str(error))
                return None
            except ProtocolError as error:
                logger.warning("PSD: %s", error)
                timeout_s = 0.0

    def fail(self, reason: str) -> None:
        """Give the drafter up."""
        self.failure = reason
        logger.error("PSD: the drafter is lost (%s); serving goes on without drafts.", reason)
