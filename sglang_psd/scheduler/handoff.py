"""Hands the target's hidden states to the drafter: rows into the mailbox, word of them into the channel."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_psd.channel.mailbox import MailboxWriter
from sglang_psd.channel.messages import FeatureRow, Features, MailboxHandle
from sglang_psd.channel.ring import RowRing
from sglang_psd.target.hidden_states import TargetFeatures
from sglang_psd.transfer import to_device

logger = logging.getLogger(__name__)


@dataclass
class Wanted:
    """A request by its place in the batch: how many of its rows count, and the tokens it gains with them."""

    index: int
    rid: str
    rows: int
    tokens: list[int]


@dataclass
class HandoffTotals:
    """What has been handed over to this drafter; ``dropped`` rows found the mailbox full."""

    handoffs: int = 0
    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0
    dropped: int = 0

    def summary(self) -> dict[str, float]:
        """As ``/server_info`` shows them."""
        mean = 1e6 * self.seconds / self.handoffs if self.handoffs else 0.0
        return {
            "handoffs": self.handoffs,
            "rows": self.rows,
            "bytes": self.bytes,
            "mean_us": round(mean, 1),
            "dropped": self.dropped,
        }


class FeatureSender:
    """Writes one drafter's mailbox.

    Parameters
    ----------
    handle : MailboxHandle
    device_index : int or None
        The drafter's GPU as this process counts; None on a CPU.
    send : callable
        Sends a message to the drafter.

    Raises
    ------
    ChannelDamagedError
        The mailbox cannot be opened.
    """

    def __init__(self, handle: MailboxHandle, device_index: int | None, send: Callable[[Features], object]):
        self._writer = MailboxWriter(handle, device_index)
        self._ring = RowRing(handle.rows)
        self._send = send
        self._warned = False
        # On a stream of its own: on the forward's the copy would wait behind the other slot's verify.
        self._stream: torch.cuda.Stream | None = None
        self.totals = HandoffTotals()

    def release(self, end: int) -> None:
        """The drafter has read everything before position ``end`` of the mailbox."""
        self._ring.release(end)

    def close(self) -> None:
        """Unmap the mailbox; nothing can be handed over afterwards."""
        self._writer.close()

    def hand_over(self, features: TargetFeatures, wanted: Sequence[Wanted]) -> None:
        """Send hidden states of accepted tokens.

        The rows are in the mailbox when this returns, so that the message may overtake nothing. A mailbox without room
        costs drafts, never text: the head's context begins anew with the next rows.

        Parameters
        ----------
        features : TargetFeatures
        wanted : sequence of Wanted
        """
        started = time.perf_counter()
        wanted = [item for item in wanted if item.rows > 0]
        total = sum(item.rows for item in wanted)
        place = self._ring.reserve(total) if total else None
        if place is None:
            self._drop(total)
            return
        offset, end = place
        with self._beside(features.rows):
            self._writer.write(offset, self._pick(features, wanted))
        if self._stream is not None:
            self._stream.synchronize()
        rows = [FeatureRow(item.rid, features.firsts[item.index], item.rows, item.tokens) for item in wanted]
        self._send(Features(offset, end, rows))
        self.totals.handoffs += 1
        self.totals.rows += total
        self.totals.bytes += total * self._writer.row_bytes
        self.totals.seconds += time.perf_counter() - started

    @staticmethod
    def _pick(features: TargetFeatures, wanted: Sequence[Wanted]) -> torch.Tensor:
        """The wanted rows side by side."""
        starts = [features.starts[item.index] for item in wanted]
        picked = [row for start, item in zip(starts, wanted) for row in range(start, start + item.rows)]
        if len(picked) == len(features.rows):
            return features.rows
        index = to_device(torch.tensor(picked, dtype=torch.int64), features.rows.device.type)
        return features.rows.index_select(0, index)

    def _beside(self, rows: torch.Tensor) -> contextlib.AbstractContextManager:
        if not rows.is_cuda:
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(rows.device, priority=-1)
        return torch.cuda.stream(self._stream)

    def _drop(self, rows: int) -> None:
        self.totals.dropped += rows
        if rows and not self._warned:
            self._warned = True
            logger.warning(
                "PSD: the drafter does not keep up with the target's hidden states; some requests go on without drafts "
                "for a while."
            )
