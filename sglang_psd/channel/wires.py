"""How bytes get from one process to the other: over a ZMQ socket, or through shared memory beside it.

A wire never waits, but for ``sleep`` and ``wait_for_room``. Messages of one direction keep their order.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Protocol

import zmq

from sglang_psd.channel.lanes import RECORD_BYTES, RESERVED_BYTES, LaneFile, record_size
from sglang_psd.errors import ChannelDamagedError

# Longest time until a sleeper looks into the shared memory by itself.
SLEEP_SLICE_S = 0.05
# A full ring is waited for in steps of this length: nothing says when there is room.
ROOM_SLICE_S = 0.001
_WAKE = b""


class Wire(Protocol):
    """What ``Channel`` needs."""

    def offer(self, data: bytes) -> bool:
        """Send; False when there is no room."""

    def take(self) -> bytes | None:
        """What has arrived; None when nothing has."""

    def sleep(self, timeout_s: float) -> None:
        """Wait for something to arrive; may return early."""

    def wait_for_room(self, timeout_s: float) -> None:
        """Wait for room after ``offer`` found none; may return early."""

    def close(self) -> None:
        """Give back what the wire holds; the socket is the caller's."""


class SocketWire:
    """Everything over the socket."""

    def __init__(self, socket: zmq.Socket):
        self._socket = socket

    def offer(self, data: bytes) -> bool:
        """See ``Wire``."""
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def take(self) -> bytes | None:
        """See ``Wire``."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def sleep(self, timeout_s: float) -> None:
        """See ``Wire``."""
        self._socket.poll(_milliseconds(timeout_s))

    def wait_for_room(self, timeout_s: float) -> None:
        """See ``Wire``."""
        self._socket.poll(_milliseconds(timeout_s), zmq.POLLOUT)

    def close(self) -> None:
        """See ``Wire``."""


class LaneWire:
    """Shared memory; the socket wakes sleepers and carries what the ring has no room for.

    A message that goes over the socket leaves a marker with its number in the ring, so that order is the ring's. The
    first message of each side does, too: its arrival shows that the sockets are connected.

    Parameters
    ----------
    socket : zmq.Socket
    lanes : LaneFile
    """

    def __init__(self, socket: zmq.Socket, lanes: LaneFile):
        self._socket = socket
        self._lanes = lanes
        self._writer, self._reader = lanes.writer, lanes.reader
        # Messages that came over the socket before their marker was looked at.
        self._aside: deque[tuple[int, bytes]] = deque()
        self._owed = False  # a marker's message is still on its way

    def offer(self, data: bytes) -> bool:
        """See ``Wire``."""
        writer = self._writer
        room = writer.room()
        if writer.sequence and record_size(len(data)) + RESERVED_BYTES <= room:
            writer.put(data)
        elif room < RECORD_BYTES or not self._send(writer.sequence.to_bytes(8, "little"), data):
            return False
        else:
            writer.put_marker()
        if writer.reader_sleeps():
            # Without room in the socket there is something else to wake up for.
            self._send(_WAKE)
        return True

    def _send(self, *parts: bytes) -> bool:
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def take(self) -> bytes | None:
        """See ``Wire``."""
        reader = self._reader
        if reader.empty():
            return None
        sequence, elsewhere = reader.head()
        if not elsewhere:
            return reader.pop()
        while not self._aside and self._read_socket():
            pass
        self._owed = not self._aside
        if self._owed:
            return None
        number, data = self._aside.popleft()
        if number != sequence:
            raise ChannelDamagedError("A message was lost on the drafter channel's socket.")
        reader.pop()
        return data

    def _read_socket(self) -> bool:
        """Put one message aside, or forget a wake-up; False when there is neither."""
        try:
            parts = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if len(parts) == 2:
            self._aside.append((int.from_bytes(parts[0], "little"), parts[1]))
        elif parts != [_WAKE]:
            raise ChannelDamagedError("The drafter channel's socket carried what is no message.")
        return True

    def sleep(self, timeout_s: float) -> None:
        """See ``Wire``."""
        self._reader.fall_asleep()
        if (self._owed or self._reader.empty()) and self._socket.poll(_milliseconds(min(timeout_s, SLEEP_SLICE_S))):
            self._read_socket()
        self._reader.wake_up()

    def wait_for_room(self, timeout_s: float) -> None:
        """See ``Wire``."""
        time.sleep(min(timeout_s, ROOM_SLICE_S))

    def close(self) -> None:
        """See ``Wire``."""
        self._lanes.close()


def _milliseconds(timeout_s: float) -> int:
    return max(1, math.ceil(timeout_s * 1e3))
