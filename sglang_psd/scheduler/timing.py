"""When the target's forwards ran, without waiting for the device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class _Span:
    start: Any
    end: Any


class ForwardTimer:
    """Brackets forwards: host clock on a CPU, CUDA events on a GPU.

    Event times are placed on the host clock by anchors: whenever the host had to wait for an event, the moment it
    came back is that event's time.

    Parameters
    ----------
    device : str
        SGLang's device name.
    """

    def __init__(self, device: str):
        self._cuda = device.startswith("cuda")
        self._anchor_event: Any = None
        self._anchor_s = 0.0

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
        return not self._cuda or span.end.query()

    def wait(self, span: _Span) -> None:
        """Wait until the forward is over (a no-op on a CPU); may set the anchor."""
        if self._cuda:
            waited = not span.end.query()
            span.end.synchronize()
            if waited or self._anchor_event is None:
                self._anchor_event, self._anchor_s = span.end, time.monotonic()

    def interval(self, span: _Span) -> tuple[float, float]:
        """Begin and end of a finished forward in seconds of ``time.monotonic``."""
        if not self._cuda:
            return span.start, span.end
        return self._at(span.start), self._at(span.end)

    def _at(self, event: Any) -> float:
        return self._anchor_s + self._anchor_event.elapsed_time(event) / 1e3
