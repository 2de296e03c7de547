"""Between host and device, waiting as little as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def to_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Copy a host tensor without waiting for the device (through pinned memory on a GPU)."""
    return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Copy tensors of one device to the host; on a GPU side by side, through pinned memory, with one wait."""
    if not tensors[0].is_cuda:
        return [tensor.numpy().copy() for tensor in tensors]
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return [copy.numpy() for copy in copies]
