"""When the target's forwards ran, without waiting for the device."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

# An end between two looks that are no further apart has been seen.
SEEN_WITHIN_S = 2e-4
# The clocks drift apart by up to a millisecond in this time, and CUDA's milliseconds are float32.
STALE_S = 30.0


@dataclass
class _Span:
    start: Any
    end: Any
    running_s: float = -math.inf  # when it was seen running last


class ForwardTimer:
    """Brackets forwards: host clock on a CPU, CUDA events on a GPU.

    Event times are placed on the host clock by anchors, events whose time the host knows: it waited for them, or looked
    right before and right after. Where neither has happened for long, an event that was found over has to do.

    Parameters
    ----------
    device : str
        SGLang's device name.
    """

    def __init__(self, device: str):
        self._cuda = device.startswith("cuda")
        self._anchor_event: Any = None
        self._anchor_s = -math.inf

    def start(self) -> _Span:
        """Mark the begin of a forward on the current stream."""
        return _Span(self._mark(), None)

    def stop(self, span: _Span) -> None:
        """Mark its end."""
        span.end = self._mark()

    def _mark(self) -> Any:
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def done(self, span: _Span) -> bool:
        """Whether the forward is over."""
        if not self._cuda:
            return True
        over, now = span.end.query(), time.monotonic()
        if not over:
            span.running_s = now
        elif now - span.running_s < SEEN_WITHIN_S:
            self._anchor_event, self._anchor_s = span.end, now
        return over

    def wait(self, span: _Span) -> None:
        """Wait until the forward is over (a no-op on a CPU); may set the anchor."""
        if self._cuda:
            waited = not span.end.query()
            span.end.synchronize()
            now = time.monotonic()
            if waited or now - self._anchor_s > STALE_S:
                self._anchor_event, self._anchor_s = span.end, now

    def interval(self, span: _Span) -> tuple[float, float]:
        """Begin and end of a finished forward in seconds of ``time.monotonic``."""
        if not self._cuda:
            return span.start, span.end
        return self._at(span.start), self._at(span.end)

    def _at(self, event: Any) -> float:
        return self._anchor_s + self._anchor_event.elapsed_time(event) / 1e3
