"""Host and watchman at a gate: one of them lets the stream go, and both know which. What a GPU does: tests/gpu."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_psd.target import gate as module
from sglang_psd.target.gate import Gate


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """One without a stream."""
    gate = object.__new__(Gate)
    gate._flag, gate._number, gate._closed = np.zeros(1, np.uint32), 0, None
    gate._lock, gate.forced = threading.Lock(), False
    monkeypatch.setattr(gate, "_wait_for", lambda number: None)
    return gate


LATE = 1e12


def test_a_claimed_gate_is_the_host_s(gate: Gate) -> None:
    """Drafts that are being written when the minute is over: the device must not read half of them."""
    with gate.closed():
        assert gate.claim()
        gate._help(LATE)
        assert not gate.forced and gate._flag[0] == 0, "it was let go while its input was being written"
    assert gate._flag[0] == 1


def test_a_forced_gate_is_not_claimed(gate: Gate) -> None:
    with gate.closed():
        gate._help(LATE)
        assert gate.forced and gate._flag[0] == 1 and not gate.claim()
    with gate.closed():
        assert not gate.forced and gate.claim()


def test_a_watchman_never_goes_back(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """He finds a gate that has been closed for too long, and the host opens it and closes the next one meanwhile."""
    started, left = threading.Event(), threading.Event()
    lock = gate._lock

    class Turnstile:
        def __enter__(self) -> None:
            if threading.current_thread() is watchman:
                started.set()
                assert left.wait(10)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    watchman = threading.Thread(target=lambda: gate._help(module.STUCK_S + gate_closed_s + 1))
    with gate.closed():
        assert gate._closed is not None
        gate_closed_s = gate._closed[1]
        gate._lock = Turnstile()  # type: ignore[assignment]
        watchman.start()
        assert started.wait(10)
    with gate.closed():
        assert gate._closed is not None
        gate._closed = gate._closed[0], gate_closed_s + 10  # closed later
        left.set()
        watchman.join()
        assert not gate.forced and gate._flag[0] == 1
    assert gate._flag[0] == 2


def test_launches_that_block_are_not_queued_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kernel behind a closed gate would never return."""
    from sglang_psd.target import worker as worker_module

    worker = object.__new__(worker_module.PSDWorker)
    worker._gate = None
    monkeypatch.setattr(worker_module, "Gate", lambda: SimpleNamespace(closed=contextlib.nullcontext))
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    worker.queue_ahead()
    assert worker._gate is None
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    worker.queue_ahead()
    assert worker._gate is not None
