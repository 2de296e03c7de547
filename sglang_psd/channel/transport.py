"""A pair of ZMQ sockets; bounded on both sides, so that it can fill but not grow.

Two processes that spin for each other's messages get shared memory beside it (``wires.LaneWire``): the sockets' threads
take a quarter of a millisecond to hand a message on, however eagerly it is awaited.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

import zmq

from sglang_psd.channel.endpoints import CurveKeys, check_endpoint
from sglang_psd.channel.lanes import LaneFile
from sglang_psd.channel.messages import Message, decode, encode
from sglang_psd.channel.wires import LaneWire, SocketWire, Wire
from sglang_psd.errors import ProtocolError, UnsendableError

# Rounds in flight are few; a queue this long only fills when the peer is stuck.
QUEUE_MESSAGES = 4096
MAX_MESSAGE_BYTES = 256 << 20
# A process that sleeps is woken late, by 0.1 ms and more: where cores are plenty, look again and again for the length
# of a round before going to sleep. While nothing has come or gone for so long nobody spins: an idle server is idle.
SPIN_S = 0.2
SPIN_CORES = 8


def spin_time(device: str) -> float:
    """Seconds worth spinning beside a model on ``device``; 0 where the model itself needs the cores."""
    return SPIN_S if device.startswith("cuda") and len(os.sched_getaffinity(0)) >= SPIN_CORES else 0.0


class Channel:
    """One end of the wire; not thread-safe.

    Parameters
    ----------
    endpoint : str
        ZMQ address, e.g. ``ipc:///…``.
    bind : bool
        The scheduler binds, the drafter connects.
    keys : CurveKeys, optional
        Needed for every address but ``ipc://`` and loopback.
    spin_s : float
        How long after the last message, sent or received, ``receive`` looks again and again before it sleeps.
    lanes : str
        File of shared memory that both ends use (``make_lanes``); empty: the sockets carry everything.

    Raises
    ------
    EndpointError
        Others could reach the address, and no key protects it.
    ChannelDamagedError
        ``lanes`` cannot be used. Also from ``send`` and ``receive``, which are of no use any more then.
    """

    def __init__(
        self, endpoint: str, *, bind: bool, keys: CurveKeys | None = None, spin_s: float = 0.0, lanes: str = ""
    ):
        check_endpoint(endpoint, keys)
        mapped = LaneFile(lanes, bind=bind) if lanes else None
        self.endpoint = endpoint
        self.spin_s = spin_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        # A longer message ends the connection: the peer is none of ours.
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if keys is not None:
            keys.apply(self._socket, bind=bind)
        if bind:
            self._socket.bind(endpoint)
            make_private(endpoint)
        else:
            self._socket.connect(endpoint)
        self._last_message_s = -math.inf
        self._wire: Wire = SocketWire(self._socket) if mapped is None else LaneWire(self._socket, mapped)

    def send(self, message: Message) -> None:
        """Queue a message; never blocks.

        Raises
        ------
        ProtocolError
            The queue is full: the peer has stopped reading.
        UnsendableError
            It is too long, or holds what msgpack has no form for.
        """
        if not self._wire.offer(_encode(message)):
            raise ProtocolError("The drafter channel is full: the other side has stopped reading.")
        self._last_message_s = time.monotonic()

    def send_patiently(self, message: Message, slice_s: float, worth_waiting: Callable[[], bool]) -> bool:
        """As ``send``, but wait for room in the queue for as long as ``worth_waiting()``; False when it gave up."""
        data = _encode(message)
        while not self._wire.offer(data):
            if not worth_waiting():
                return False
            self._wire.wait_for_room(slice_s)
        self._last_message_s = time.monotonic()
        return True

    def receive(self, timeout_s: float) -> Message | None:
        """Next message, or None when none came within ``timeout_s`` seconds."""
        started = time.monotonic()
        while True:
            data = self._wire.take()
            now = time.monotonic()
            if data is not None:
                self._last_message_s = now
                return decode(data)
            if now - started >= timeout_s:
                return None
            if now - self._last_message_s >= self.spin_s:
                self._wire.sleep(timeout_s - (now - started))

    def receive_within(self, timeout_s: float, slice_s: float, alive: Callable[[], bool]) -> Message | None:
        """As ``receive``, but give up early once ``alive()`` turns false (checked every ``slice_s``)."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            message = self.receive(max(0.0, min(slice_s, left)))
            if message is not None or left <= 0 or not alive():
                return message

    def close(self) -> None:
        """Close the socket; queued messages are dropped."""
        self._context.destroy(linger=0)
        self._wire.close()


def make_private(endpoint: str) -> None:
    """Let only this user open the socket file of an ``ipc://`` address."""
    kind, _, path = endpoint.partition("://")
    if kind == "ipc":
        os.chmod(path, 0o600)


def _encode(message: Message) -> bytes:
    try:
        data = encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        raise UnsendableError(f"A message cannot go over the drafter channel ({error}).") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise UnsendableError(
            f"A message of {len(data)} bytes is too long for the drafter channel ({MAX_MESSAGE_BYTES} at most)."
        )
    return data
