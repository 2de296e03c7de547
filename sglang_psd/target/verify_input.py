"""A verify as attention backends and CUDA graph runner see it."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput


class ChainVerifyInput(DFlashVerifyInput):
    """A linear verify, as attention backends and graph runner see it.

    DFLASH verifies chains too: its input carries no mask, so every backend takes its causal path.
    """


def chain_verify_input(num_tokens: int, positions: torch.Tensor | None, hidden: bool = False) -> ChainVerifyInput:
    """Describe a linear verify of ``num_tokens`` per request; ``hidden``: keep the hidden states of all of them."""
    return ChainVerifyInput(
        draft_token=None,
        positions=positions,
        draft_token_num=num_tokens,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.FULL if hidden else CaptureHiddenMode.NULL,
    )
