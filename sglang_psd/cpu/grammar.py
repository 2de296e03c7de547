"""XGrammar's bitmask without a GPU.

SGLang allocates the mask in pinned memory and applies it with GPU kernels only; the library itself has a CPU
implementation. ``bootstrap.py`` calls ``patch`` when SGLang imports its XGrammar backend on a CPU-only machine.
"""

from __future__ import annotations

from types import ModuleType

import torch


def patch(backend: ModuleType) -> None:
    """Give ``sglang/srt/constrained/xgrammar_backend.py`` a mask in ordinary memory, applied on the CPU."""
    from xgrammar import apply_token_bitmask_inplace

    def allocate(vocab_size: int, batch_size: int) -> torch.Tensor:
        shape = backend.get_bitmask_shape(batch_size, vocab_size)
        return torch.full(shape, -1, dtype=backend.bitmask_dtype)

    def apply(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        apply_token_bitmask_inplace(logits, vocab_mask)

    allocate.__wrapped__ = backend._allocate_token_bitmask  # type: ignore[attr-defined]
    backend._allocate_token_bitmask = allocate  # type: ignore[attr-defined]
    for cls in vars(backend).values():
        if isinstance(cls, type) and cls.__module__ == backend.__name__ and "apply_vocab_mask" in vars(cls):
            cls.apply_vocab_mask = staticmethod(apply)  # type: ignore[attr-defined]
