"""Two byte rings in a file that both processes map, one a direction: a message crosses without a system call.

A ring has one writer and one reader. Each keeps its own counter of bytes and publishes it in the file; the other side's
counter is looked at and checked, never trusted. A record is a header (length, number of the message), the bytes, and
padding; it may go over the end of the ring.

What this relies on, and why it is for x86-64 only (``supported``):

* stores of one processor are seen by others in their order, so a counter stored after the bytes is seen after them;
* CPython stores one aligned 8-byte item of a ``memoryview`` cast to ``Q`` by one instruction: counters do not tear;
* taking a lock is a locked instruction, after which earlier stores are visible and nothing later has been read. The
  sleeper's "I sleep, is there anything?" and the writer's "here it is, do you sleep?" cannot both miss each other.
"""

from __future__ import annotations

import mmap
import os
import platform
import threading

from sglang_psd.errors import ChannelDamagedError, EndpointError

CAPACITY = 2 << 20  # bytes of one ring, a power of two
RECORD_BYTES = 16  # a record's header; records are multiples of it, so that no header goes over the end
# Only markers may use the last part: messages that find no room then still keep their order (``wires.LaneWire``).
RESERVED_BYTES = 4096 * RECORD_BYTES

_MAGIC = int.from_bytes(b"psdlane1", "little")
_HEADER_BYTES = 4096
_ELSEWHERE = (1 << 64) - 1  # in a record's length: the message comes over the socket
_WORD = 8
_LINE_WORDS = 8  # counters have cache lines of their own
_FENCE = threading.Lock()


def supported() -> bool:
    """Whether this machine orders its stores as the rings need it."""
    return platform.machine().lower() in ("x86_64", "amd64")


def make_lanes(path: str) -> None:
    """Make the file, for this user only.

    Raises
    ------
    EndpointError
        There is no room for it.
    """
    size = _HEADER_BYTES + 2 * CAPACITY
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Reserved now: a disk that is full later would end the process that writes to the mapping.
            os.posix_fallocate(file, 0, size)
            with mmap.mmap(file, size) as mapping, memoryview(mapping).cast("Q") as words:
                words[1], words[0] = CAPACITY, _MAGIC
        finally:
            os.close(file)
    except OSError as error:
        raise EndpointError(f"No shared memory for the drafter channel ({error.strerror or error}).") from None


class LaneFile:
    """The mapped file, seen from one end.

    Parameters
    ----------
    path : str
        Made by ``make_lanes``.
    bind : bool
        Which end this is, as in ``Channel``.

    Raises
    ------
    ChannelDamagedError
        It is no such file.
    """

    def __init__(self, path: str, *, bind: bool):
        size = _HEADER_BYTES + 2 * CAPACITY
        try:
            file = os.open(path, os.O_RDWR)
            try:
                self._mapping = mmap.mmap(file, size)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise ChannelDamagedError(f"The drafter channel's shared memory cannot be mapped ({error}).") from None
        self._view = memoryview(self._mapping)
        self._words = self._view.cast("Q")
        if (self._words[0], self._words[1]) != (_MAGIC, CAPACITY):
            raise ChannelDamagedError("The drafter channel's shared memory is not of this version.")
        self.writer = LaneWriter(self._words, self._data(int(bind)), int(bind))
        self.reader = LaneReader(self._words, self._data(int(not bind)), int(not bind))

    def _data(self, lane: int) -> memoryview:
        start = _HEADER_BYTES + lane * CAPACITY
        return self._view[start : start + CAPACITY]

    def close(self) -> None:
        """Unmap the file; neither end can be used afterwards."""
        for view in (self.writer.data, self.reader.data, self._words, self._view):
            view.release()
        self._mapping.close()


class _Lane:
    """What both ends of a ring share: where its counters are, and its bytes."""

    def __init__(self, words: memoryview, data: memoryview, lane: int):
        self._words = words
        self.data = data
        self._data_word = (_HEADER_BYTES + lane * CAPACITY) // _WORD
        self._written_at, self._read_at, self._asleep_at = ((1 + 3 * lane + i) * _LINE_WORDS for i in range(3))


class LaneWriter(_Lane):
    """The writing end of one ring.

    Attributes
    ----------
    sequence : int
        Number of the next message.
    """

    def __init__(self, words: memoryview, data: memoryview, lane: int):
        super().__init__(words, data, lane)
        if words[self._written_at]:
            raise ChannelDamagedError("The drafter channel's shared memory belongs to another process already.")
        self._written = 0
        self.sequence = 0

    def room(self) -> int:
        """Bytes that are free.

        Raises
        ------
        ChannelDamagedError
            The reader's counter is no such counter.
        """
        used = self._written - self._words[self._read_at]
        if not 0 <= used <= CAPACITY:
            raise ChannelDamagedError("The drafter channel's shared memory is damaged (reader's counter).")
        return CAPACITY - used

    def put(self, message: bytes) -> None:
        """Append a message; ``room`` has been asked for ``record_size(len(message))`` bytes."""
        self._header(len(message))
        start = (self._written + RECORD_BYTES) % CAPACITY
        first = min(len(message), CAPACITY - start)
        self.data[start : start + first] = message[:first]
        if first < len(message):
            self.data[: len(message) - first] = message[first:]
        self._publish(record_size(len(message)))

    def put_marker(self) -> None:
        """Say that the next message comes over the socket; it has been sent already."""
        self._header(_ELSEWHERE)
        self._publish(RECORD_BYTES)

    def _header(self, length: int) -> None:
        at = self._data_word + self._written % CAPACITY // _WORD
        self._words[at], self._words[at + 1] = length, self.sequence

    def _publish(self, size: int) -> None:
        self._written += size
        self.sequence += 1
        self._words[self._written_at] = self._written
        with _FENCE:
            pass

    def reader_sleeps(self) -> bool:
        """Whether the reader has to be woken; said once."""
        asleep = bool(self._words[self._asleep_at])
        if asleep:
            self._words[self._asleep_at] = 0
        return asleep


class LaneReader(_Lane):
    """The reading end of one ring."""

    def __init__(self, words: memoryview, data: memoryview, lane: int):
        super().__init__(words, data, lane)
        self._read = 0
        self._sequence = 0

    def empty(self) -> bool:
        """Whether nothing waits."""
        return self._words[self._written_at] == self._read

    def head(self) -> tuple[int, bool]:
        """Number of the message that waits, and whether it comes over the socket.

        Raises
        ------
        ChannelDamagedError
            What stands there was not written by ``LaneWriter``; nothing outside the ring has been read.
        """
        waiting = self._words[self._written_at] - self._read
        length, sequence = self._next()
        size = RECORD_BYTES if length == _ELSEWHERE else record_size(length)
        if not RECORD_BYTES <= waiting <= CAPACITY or size > waiting or sequence != self._sequence:
            raise ChannelDamagedError("The drafter channel's shared memory is damaged.")
        return sequence, length == _ELSEWHERE

    def pop(self) -> bytes:
        """Take what ``head`` has seen; empty for a marker."""
        length = self._next()[0]
        length = 0 if length == _ELSEWHERE else length
        if record_size(length) > CAPACITY:
            raise ChannelDamagedError("The drafter channel's shared memory is damaged.")
        start = (self._read + RECORD_BYTES) % CAPACITY
        first = min(length, CAPACITY - start)
        message = bytes(self.data[start : start + first])
        if first < length:
            message += bytes(self.data[: length - first])
        self._read += record_size(length)
        self._sequence += 1
        self._words[self._read_at] = self._read
        return message

    def _next(self) -> tuple[int, int]:
        at = self._data_word + self._read % CAPACITY // _WORD
        return self._words[at], self._words[at + 1]

    def fall_asleep(self) -> None:
        """Ask to be woken; look once more afterwards."""
        self._words[self._asleep_at] = 1
        with _FENCE:
            pass

    def wake_up(self) -> None:
        """No need to be woken any more."""
        self._words[self._asleep_at] = 0


def record_size(length: int) -> int:
    """Bytes that a message of ``length`` bytes takes in a ring."""
    return RECORD_BYTES + -(-length // RECORD_BYTES) * RECORD_BYTES
