"""From host to device without waiting."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Copy a host tensor without waiting for the device (through pinned memory on a GPU)."""
    return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
