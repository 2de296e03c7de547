"""Work is queued on a stream before its input is there; a write to host memory lets it go.

A verify waits for its drafts and for nothing else. Queuing it takes the host longer than the drafts take to arrive, so
it is queued first: the stream waits at a word of pinned memory, which the host raises when the drafts stand beside it
(``cuStreamWaitValue32``, CUDA driver API, "Stream memory operations"). Until then nothing may be asked of the device
that waits for it: neither a synchronisation nor memory that the allocator has to free something for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

# Hardly anybody waits for drafts this long. Longer means that the host itself waits for the device, and both for ever.
STUCK_S = 60.0
_CHECK_S = 1.0
_NUMBERS = 1 << 32


class Gate:
    """One at a time, on the current stream of the thread that closes it.

    Attributes
    ----------
    forced : bool
        Whether what was queued last was let go because the host was stuck; pinned memory may have been read since.

    Raises
    ------
    ImportError
        There are no bindings of the CUDA driver (``cuda-bindings``, which PyTorch brings along).
    """

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._address = flag.data_ptr()
        self._flag = flag.numpy().view(np.uint32)
        self._number = 0
        self._closed: tuple[int, float] | None = None  # its number, and since when; None: the watchman leaves it alone
        # Host and watchman never let go at the same time; it is a fence for what was written to pinned memory before.
        self._lock = threading.Lock()
        self.forced = False
        threading.Thread(target=self._watch, name="psd-gate", daemon=True).start()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Let what is queued on the current stream in here wait until the block is left."""
        number = (self._number + 1) % _NUMBERS
        self._wait_for(number)
        self._number, self.forced = number, False
        self._closed = number, time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._closed = None
            self._open(number)

    def claim(self) -> bool:
        """Whether the stream still waits, and will until the block is left: its input may be written now."""
        with self._lock:
            self._closed = None
            return not self.forced

    def _open(self, number: int) -> None:
        self._flag[0] = number

    def _wait_for(self, number: int) -> None:
        # "At least", in cyclic order: an older wait never blocks once a newer one has been let go.
        condition = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        stream = torch.cuda.current_stream().cuda_stream
        (error,) = self._driver.cuStreamWaitValue32(stream, self._address, number, condition)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"The CUDA driver cannot let a stream wait for host memory ({error.name}).")

    def _watch(self) -> None:
        while True:
            time.sleep(_CHECK_S)
            self._help(time.monotonic())

    def _help(self, now_s: float) -> None:
        """Let go what has waited for too long, unless its input is being written by now."""
        with self._lock:
            closed = self._closed
            if closed is None or now_s - closed[1] <= STUCK_S:
                return
            self._closed, self.forced = None, True
            self._open(closed[0])
        logger.error("PSD: a verify was let go without its drafts: the host waited for the device meanwhile.")
