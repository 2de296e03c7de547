"""When the target's forwards ran, without waiting for the device."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

# How fast the clocks of host and device may drift apart, seconds a second. CUDA's milliseconds are float32 as well:
# events that lie hours apart are off by more.
DRIFT = 3e-5


@dataclass
class _Span:
    start: Any
    end: Any
    running_s: float = 0.0  # on a GPU: a moment at which the forward was not over yet


class ForwardTimer:
    """Brackets forwards: host clock on a CPU, CUDA events on a GPU.

    Event times are placed on the host clock by an anchor, an event whose time on that clock is known: exactly when the
    host had to wait for it, else within the time since the forward was last seen running. An anchor stays until the
    clocks may have drifted apart by more than another one would be off.

    Parameters
    ----------
    device : str
        SGLang's device name.
    """

    def __init__(self, device: str):
        self._cuda = device.startswith("cuda")
        self._anchor_event: Any = None
        self._anchor_s = 0.0
        self._unsure_s = math.inf

    def start(self) -> _Span:
        """Mark the begin of a forward on the current stream."""
        return _Span(self._mark(), None)

    def stop(self, span: _Span) -> None:
        """Mark its end."""
        span.running_s = time.monotonic()
        span.end = self._mark()

    def _mark(self) -> Any:
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def done(self, span: _Span) -> bool:
        """Whether the forward is over; may set the anchor."""
        if not self._cuda:
            return True
        over, now = span.end.query(), time.monotonic()
        if over:
            self._may_anchor(span, now, now - span.running_s)
        else:
            span.running_s = now
        return over

    def wait(self, span: _Span) -> None:
        """Wait until the forward is over (a no-op on a CPU); may set the anchor."""
        if self._cuda and not self.done(span):
            span.end.synchronize()
            self._may_anchor(span, time.monotonic(), 0.0)

    def _may_anchor(self, span: _Span, now_s: float, since_s: float) -> None:
        """The forward ended within the last ``since_s`` seconds."""
        if since_s / 2 <= self._unsure_s + DRIFT * (now_s - self._anchor_s):
            self._anchor_event, self._anchor_s, self._unsure_s = span.end, now_s - since_s / 2, since_s / 2

    def interval(self, span: _Span) -> tuple[float, float]:
        """Begin and end of a finished forward in seconds of ``time.monotonic``."""
        if not self._cuda:
            return span.start, span.end
        return self._at(span.start), self._at(span.end)

    def _at(self, event: Any) -> float:
        return self._anchor_s + self._anchor_event.elapsed_time(event) / 1e3
