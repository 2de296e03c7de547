"""Event times on the host clock: exact to a fraction of a millisecond, however long the server has been up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_psd.scheduler import timing
from sglang_psd.scheduler.timing import ForwardTimer


class Device:
    """A GPU and a host with one clock each; the device's runs 30 millionths fast."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s = 1000.0
        self.ends_s = 0.0
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(self))
        monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def forward(self, timer: ForwardTimer, seconds: float) -> Any:
        """Launch a forward that takes so long."""
        self.ends_s = max(self.now_s, self.ends_s)
        span = timer.start()
        self.ends_s += seconds
        timer.stop(span)
        return span


class Event:
    """Recorded at the end of what has been launched."""

    def __init__(self, device: Device):
        self._device = device
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = self._device.ends_s

    def query(self) -> bool:
        return self._device.now_s >= self.at_s

    def synchronize(self) -> None:
        self._device.now_s = max(self._device.now_s, self.at_s)

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds as float32, as CUDA gives them."""
        return float(np.float32((other.at_s - self.at_s) * 1e3 * (1 + 30e-6)))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_a_forward_that_is_waited_for(device: Device) -> None:
    timer = ForwardTimer("cuda")
    span = device.forward(timer, 0.005)
    timer.wait(span)
    assert timer.interval(span) == pytest.approx((1000.0, 1000.005), abs=1e-5)


def test_a_loop_that_never_waits_sees_forwards_end(device: Device) -> None:
    """While drafts are awaited somebody looks again and again: what ended between two looks ended there."""
    timer = ForwardTimer("cuda")
    timer.wait(device.forward(timer, 0.005))
    for _ in range(5):
        device.now_s += 7200.0
        span, begin = device.forward(timer, 0.005), device.now_s
        while not timer.done(span):
            device.now_s += 50e-6
        timer.wait(span)
        assert timer.interval(span) == pytest.approx((begin, begin + 0.005), abs=1e-4)


def test_nobody_looks_for_hours(device: Device) -> None:
    """An anchor that is too old is worse than one that comes a little late."""
    timer = ForwardTimer("cuda")
    timer.wait(device.forward(timer, 0.005))
    device.now_s += 10 * 3600.0
    span, begin = device.forward(timer, 0.005), device.now_s
    device.now_s += 0.006
    timer.wait(span)
    start_s, end_s = timer.interval(span)
    assert end_s - start_s == pytest.approx(0.005, abs=1e-5)
    assert start_s == pytest.approx(begin, abs=3e-3), "it was seen to be over six milliseconds after its launch"


def test_a_late_look_leaves_a_good_anchor_alone(device: Device) -> None:
    timer = ForwardTimer("cuda")
    timer.wait(device.forward(timer, 0.005))
    device.now_s += 10.0
    span, begin = device.forward(timer, 0.005), device.now_s
    device.now_s += 0.020
    assert timer.done(span)
    timer.wait(span)
    assert timer.interval(span) == pytest.approx((begin, begin + 0.005), abs=5e-4)


def test_a_cpu_takes_the_host_clock() -> None:
    timer = ForwardTimer("cpu")
    span = timer.start()
    timer.stop(span)
    assert timer.done(span)
    timer.wait(span)
    start_s, end_s = timer.interval(span)
    assert start_s <= end_s
