"""A ring of hidden-state rows that the target writes and the drafter reads, without a copy through the host.

The drafter owns it: on its own GPU, opened by the target's process through CUDA IPC, or in a file that both map where
there is no GPU. Which rows are whose is said by ``Features`` messages on the channel; a row may be overwritten once
``Credit`` has given it back. The only file of this package that imports torch.
"""

from __future__ import annotations

import mmap
import os

import torch

from sglang_psd.channel.messages import CudaHandle, MailboxHandle
from sglang_psd.errors import ChannelDamagedError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Mailbox:
    """The reader's end.

    Parameters
    ----------
    rows, width : int
        Shape of the ring.
    dtype : torch.dtype
    device : str
        The drafter's.
    folder : str
        Where the file is made when ``device`` is ``cpu``: a folder of this user's alone, removed with the endpoint.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: str, folder: str):
        self._path = ""
        if device == "cpu":
            self._path = os.path.join(folder, f"mailbox-{os.getpid()}")
            self._ring = _map_file(self._path, rows, width, dtype, create=True)
        else:
            self._ring = torch.zeros(rows, width, dtype=dtype, device=device)
        self._dtype = str(dtype).removeprefix("torch.")

    @property
    def rows(self) -> int:
        """Size of the ring."""
        return len(self._ring)

    def handle(self) -> MailboxHandle:
        """What the writer needs to open it."""
        rows, width = self._ring.shape
        if self._path:
            return MailboxHandle(rows, width, self._dtype, path=self._path)
        shared = self._ring.untyped_storage()._share_cuda_()
        return MailboxHandle(rows, width, self._dtype, cuda=CudaHandle(*shared[1:]))

    def read(self, offset: int, rows: int) -> torch.Tensor:
        """Copy ``rows`` rows out of the ring, ``[rows, width]``; on a GPU the copy is queued on the current stream."""
        return self._ring[offset : offset + rows].clone()


class MailboxWriter:
    """The writer's end.

    Parameters
    ----------
    handle : MailboxHandle
        From the drafter.
    device_index : int or None
        The drafter's GPU as this process counts; None without a GPU.

    Raises
    ------
    ChannelDamagedError
        It cannot be opened: its owner has ended meanwhile, or its file was removed.
    """

    def __init__(self, handle: MailboxHandle, device_index: int | None):
        try:
            self._ring = self._open(handle, device_index)
        except (KeyError, OSError, RuntimeError, ValueError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ChannelDamagedError(f"The drafter's mailbox cannot be opened ({reason}).") from None

    @staticmethod
    def _open(handle: MailboxHandle, device_index: int | None) -> torch.Tensor:
        dtype = DTYPES[handle.dtype]
        if handle.cuda is None:
            return _map_file(handle.path, handle.rows, handle.width, dtype, create=False)
        assert device_index is not None
        with torch.cuda.device(device_index):
            storage = torch.UntypedStorage._new_shared_cuda(device_index, *handle.cuda.arguments())
            ring = torch.empty(0, dtype=dtype, device=f"cuda:{device_index}")
            return ring.set_(storage, 0, (handle.rows, handle.width), (handle.width, 1))

    def close(self) -> None:
        """Unmap the ring: while it is mapped, the memory of an owner that has ended is not given back."""
        self._ring = self._ring.new_empty(0, self._ring.shape[1])

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return self._ring.shape[1] * self._ring.element_size()

    def write(self, offset: int, rows: torch.Tensor) -> None:
        """Put ``rows`` ``[n, width]`` into the ring; on a GPU queued on the current stream, peer to peer."""
        self._ring[offset : offset + len(rows)].copy_(rows.to(self._ring.dtype), non_blocking=True)


def _map_file(path: str, rows: int, width: int, dtype: torch.dtype, *, create: bool) -> torch.Tensor:
    """Map a file that other processes map too, as a tensor ``[rows, width]``."""
    # Not ``torch.from_file``: it makes a file where there is none, and nobody would read what is written to that.
    size = rows * width * dtype.itemsize
    file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    try:
        if create:
            # Reserved now: a disk that is full later would end the process that writes to the mapping.
            os.posix_fallocate(file, 0, size)
        mapping = mmap.mmap(file, size)
    finally:
        os.close(file)
    return torch.frombuffer(mapping, dtype=dtype).view(rows, width)
