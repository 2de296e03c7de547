"""A bad wire: sits between scheduler and drafter and does to messages what the test says."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq

from sglang_psd.channel.endpoints import PrivateEndpoint
from sglang_psd.channel.transport import make_private

# A frame becomes any number of (seconds to wait, bytes).
Fault = Callable[[bytes, random.Random], list[tuple[float, bytes]]]


def delayed(frame: bytes, rng: random.Random) -> list[tuple[float, bytes]]:
    """Every frame is late, each by another time: order is lost as well."""
    return [(rng.uniform(0.0, 0.05), frame)]


def duplicated(frame: bytes, rng: random.Random) -> list[tuple[float, bytes]]:
    """Some frames come again, at once or when others have passed."""
    return [(0.0, frame)] + ([(rng.choice([0.0, 0.02]), frame)] if rng.random() < 0.3 else [])


def reordered(frame: bytes, rng: random.Random) -> list[tuple[float, bytes]]:
    """Some frames are overtaken."""
    return [(0.02 if rng.random() < 0.3 else 0.0, frame)]


def dropped(frame: bytes, rng: random.Random) -> list[tuple[float, bytes]]:
    """Some frames never come."""
    return [] if rng.random() < 0.15 else [(0.0, frame)]


def truncated(frame: bytes, rng: random.Random) -> list[tuple[float, bytes]]:
    """Some frames lose their end."""
    return [(0.0, frame[: rng.randrange(len(frame))] if rng.random() < 0.15 else frame)]


def corrupted(frame: bytes, rng: random.Random) -> list[tuple[float, bytes]]:
    """Some frames have a byte changed, wherever it may be."""
    if rng.random() < 0.15:
        damaged = bytearray(frame)
        damaged[rng.randrange(len(frame))] = rng.randrange(256)
        return [(0.0, bytes(damaged))]
    return [(0.0, frame)]


def noise(frame: bytes, rng: random.Random) -> list[tuple[float, bytes]]:
    """Between the frames come bytes that never were a message."""
    return [(0.0, frame)] + ([(0.0, rng.randbytes(rng.randrange(64)))] if rng.random() < 0.3 else [])


FAULTS: dict[str, Fault] = {
    fault.__name__: fault for fault in (delayed, duplicated, reordered, dropped, truncated, corrupted, noise)
}


@dataclass
class Wire:
    """What a proxy did; read it when the test is over.

    Attributes
    ----------
    frames, harmed : int
        Frames that came by, and those that the fault changed.
    """

    frames: int = 0
    harmed: int = 0
    _late: list[tuple[float, int, bytes]] = field(default_factory=list)

    @property
    def num_late(self) -> int:
        """Frames that are held back."""
        return len(self._late)


class FaultyProxy:
    """Binds an address for the drafter and connects to the scheduler's; frames pass through ``fault``.

    The first frame of the drafter, its greeting, passes unharmed: a drafter that cannot greet is another test.

    Parameters
    ----------
    endpoint : PrivateEndpoint
        Bound here.
    behind : str
        The scheduler's address.
    fault : Fault
    seed : int
    """

    def __init__(self, endpoint: PrivateEndpoint, behind: str, fault: Fault, seed: int = 0):
        self._front, self._behind = endpoint.address, behind
        self._fault = fault
        self._rng = random.Random(seed)
        self._ended = threading.Event()
        self.active = True
        self.to_drafter, self.to_scheduler = Wire(), Wire()
        self._thread = threading.Thread(target=self._run, name="faulty-proxy", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        context = zmq.Context()
        drafter, scheduler = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        drafter.bind(self._front)
        make_private(self._front)
        scheduler.connect(self._behind)
        while not drafter.poll(50):
            if self._ended.is_set():
                context.destroy(linger=0)
                return
        scheduler.send(drafter.recv())
        poller = zmq.Poller()
        poller.register(drafter, zmq.POLLIN)
        poller.register(scheduler, zmq.POLLIN)
        while not self._ended.is_set():
            poller.poll(2)
            self._pass_on(scheduler, drafter, self.to_drafter)
            self._pass_on(drafter, scheduler, self.to_scheduler)
        context.destroy(linger=0)

    def _pass_on(self, source: zmq.Socket, sink: zmq.Socket, wire: Wire) -> None:
        for frame in _waiting(source):
            wire.frames += 1
            parts = self._fault(frame, self._rng) if self.active else [(0.0, frame)]
            wire.harmed += parts != [(0.0, frame)]
            for delay_s, part in parts:
                wire._late.append((time.monotonic() + delay_s, wire.frames, part))
        now = time.monotonic()
        due = sorted(item for item in wire._late if item[0] <= now)
        wire._late = [item for item in wire._late if item[0] > now]
        for _, _, part in due:
            try:
                sink.send(part, zmq.NOBLOCK)
            except zmq.Again:
                wire.harmed += 1  # that side has stopped reading

    def heal(self) -> None:
        """Harm no frame from now on, and wait until those that are late have been passed on."""
        self.active = False
        while self._thread.is_alive() and (self.to_drafter.num_late or self.to_scheduler.num_late):
            self._thread.join(0.001)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()


def _waiting(socket: zmq.Socket) -> Iterator[bytes]:
    while True:
        try:
            yield socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
