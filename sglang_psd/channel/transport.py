"""A pair of ZMQ sockets over a private IPC path."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time

import zmq

from sglang_psd.channel.messages import Message, decode, encode
from sglang_psd.errors import ProtocolError

# Rounds in flight are few; a queue this long only fills when the peer is stuck.
QUEUE_MESSAGES = 4096
MAX_MESSAGE_BYTES = 256 << 20


class Channel:
    """One end of the wire; not thread-safe.

    Parameters
    ----------
    endpoint : str
        ZMQ address, e.g. ``ipc:///…``.
    bind : bool
        The scheduler binds, the drafter connects.
    """

    def __init__(self, endpoint: str, *, bind: bool):
        self.endpoint = endpoint
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if bind:
            self._socket.bind(endpoint)
        else:
            self._socket.connect(endpoint)

    def send(self, message: Message) -> None:
        """Queue a message; never blocks.

        Raises
        ------
        ProtocolError
            The queue is full: the peer has stopped reading.
        """
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise ProtocolError("The drafter channel is full: the drafter has stopped reading.") from None

    def receive(self, timeout_s: float) -> Message | None:
        """Next message, or None when none came within ``timeout_s`` seconds."""
        try:
            return decode(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            pass
        if timeout_s <= 0 or not self._socket.poll(max(1, int(timeout_s * 1e3))):
            return None
        return decode(self._socket.recv(zmq.NOBLOCK))

    def receive_within(self, timeout_s: float, slice_s: float, alive) -> Message | None:
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


class PrivateEndpoint:
    """A random IPC path in a folder that only this user can enter; removed by ``cleanup``."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="sglang-psd-")  # created with mode 0700
        self.address = "ipc://" + os.path.join(self.folder, secrets.token_hex(8))

    def cleanup(self) -> None:
        """Remove the folder and the socket file in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
