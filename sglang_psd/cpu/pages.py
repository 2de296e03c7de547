"""Paged KV without a GPU: SGLang's two allocation kernels in PyTorch.

``PagedTokenToKVPoolAllocator`` (``sglang/srt/mem_cache/allocator/paged.py``) keeps its lists on the host and leaves the
arithmetic of slots to two Triton kernels. Everything else of it stays as it is: only the kernels are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class HostKernel:
    """A function behind the launch syntax of Triton, ``kernel[grid](...)``.

    Parameters
    ----------
    function : callable
        Takes what the kernel takes.
    original : object
        The kernel it stands in for.
    """

    def __init__(self, function: Callable[..., None], original: Any):
        self.function = function
        self.__wrapped__ = original

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.function


def pages_of(lengths: torch.Tensor, page_size: int) -> torch.Tensor:
    """Pages that sequences of ``lengths`` tokens take, the last one perhaps in part."""
    return (lengths + page_size - 1) // page_size


def extend_slots(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    _batch_upper: int,
    page_size: int,
) -> None:
    """KV slots of sequences that grow from ``prefix_lens`` to ``seq_lens`` tokens, request after request.

    Parameters
    ----------
    prefix_lens, seq_lens : Tensor, ``[B] int64``
    last_loc : Tensor, ``[B] int64``
        Slot of each prefix's last token: its page is filled up first.
    free_pages : Tensor, ``[F] int64``
        New pages come from its beginning. The caller checks afterwards whether there were enough.
    out_indices : Tensor, ``[sum(seq_lens - prefix_lens)] int64``
        Written.
    """
    pages_before = pages_of(prefix_lens, page_size)
    new_pages = pages_of(seq_lens, page_size) - pages_before
    if int(new_pages.sum()) > len(free_pages):
        return
    first_page = new_pages.cumsum(0) - new_pages
    begin = 0
    for row, (prefix, length) in enumerate(zip(prefix_lens.tolist(), seq_lens.tolist())):
        positions = torch.arange(prefix, length, device=out_indices.device)
        slots = last_loc[row] + 1 + positions - prefix
        fresh = positions >= pages_before[row] * page_size
        page = first_page[row] + positions[fresh] // page_size - pages_before[row]
        slots[fresh] = free_pages[page] * page_size + positions[fresh] % page_size
        out_indices[begin : begin + len(positions)] = slots
        begin += len(positions)


def decode_slots(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    batch_upper: int,
    page_size: int,
) -> None:
    """One more slot per sequence; ``seq_lens`` count it."""
    extend_slots(seq_lens - 1, seq_lens, last_loc, free_pages, out_indices, batch_upper, page_size)


def install() -> None:
    """Put the functions where the allocator looks its kernels up."""
    from sglang.srt.mem_cache.allocator import paged

    if not isinstance(paged.alloc_extend_kernel, HostKernel):
        paged.alloc_extend_kernel = HostKernel(extend_slots, paged.alloc_extend_kernel)
        paged.alloc_decode_kernel = HostKernel(decode_slots, paged.alloc_decode_kernel)
