"""The drafter's sign of life: a byte five times a second, from a thread of its own.

It says that the process runs (not stopped, not frozen, its host reachable), also while its main thread is in a long
forward. Whether the main thread gets anywhere is another question: the answers to ``Ping`` tell.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import zmq

from sglang_psd.channel.endpoints import CurveKeys, check_endpoint
from sglang_psd.channel.transport import make_private

BEAT_S = 0.2


class PulseSender:
    """Beats until the process ends."""

    def __init__(self, endpoint: str, keys: CurveKeys | None = None):
        check_endpoint(endpoint, keys)
        self._endpoint = endpoint
        self._keys = keys
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="psd-pulse", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        # Context and socket belong to this thread alone.
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 1)
        if self._keys is not None:
            self._keys.apply(socket, bind=False)
        socket.connect(self._endpoint)
        while True:
            # The first beat is there before the greeting: a drafter that stops right behind it is seen to be silent.
            try:
                socket.send(b"\0", zmq.NOBLOCK)
            except zmq.Again:
                pass  # nobody reads: the scheduler is busy, and one beat is as good as many
            if self._stop.wait(BEAT_S):
                break
        context.destroy(linger=0)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()


class PulseReader:
    """How long ago the last beat was seen; not thread-safe.

    Beats wait in a queue of a few while nobody looks, so a look after a pause of our own finds one: ``silence_s``
    tells of the drafter's pauses only.

    Parameters
    ----------
    endpoint : str
        Bound here.
    keys : CurveKeys, optional
    clock : callable
        Seconds, monotonic.
    """

    def __init__(self, endpoint: str, keys: CurveKeys | None = None, clock: Callable[[], float] = time.monotonic):
        check_endpoint(endpoint, keys)
        self._clock = clock
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 4)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 64)
        if keys is not None:
            keys.apply(self._socket, bind=True)
        self._socket.bind(endpoint)
        make_private(endpoint)
        self._last_beat_s: float | None = None

    def silence_s(self) -> float:
        """Seconds without a beat; 0 before the first one (the drafter is loading), without end once closed."""
        if self._socket.closed:
            return float("inf")
        now = self._clock()
        if self._drain():
            self._last_beat_s = now
        return 0.0 if self._last_beat_s is None else now - self._last_beat_s

    def _drain(self) -> bool:
        seen = False
        while True:
            try:
                self._socket.recv(zmq.NOBLOCK)
                seen = True
            except zmq.Again:
                return seen

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)
