"""Penalties that look at what was generated, applied at every position of a chunk.

SGLang keeps its penalties in tensors that learn one token per step, and its own speculative path applies the state
before the chunk to all of the chunk. Here position ``j`` of a chunk sees the output so far plus drafts ``0 … j - 1``:
exactly what the plain server would have seen, had it generated those tokens. Counts follow the request's output, so
they survive retraction.

Order, as in SGLang's overlap scheduler: frequency and presence are subtracted, then repetition scales, then
``min_new_tokens`` forbids stops. Like SGLang's, all of them look at generated tokens only, not at the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_psd.transfer import to_device


@dataclass
class PenaltyRow:
    """One request with penalties.

    Attributes
    ----------
    row : int
        Its place in the batch.
    counts : Tensor, ``[V] float32``
        How often each token stands in its output.
    num_generated : int
        Length of that output.
    frequency, presence, repetition : float
        As SGLang's sampling parameters; 0, 0 and 1 mean none.
    min_new_tokens : int
    stop_ids : sequence of int
        Forbidden while fewer than ``min_new_tokens`` tokens have been generated.
    """

    row: int
    counts: torch.Tensor
    num_generated: int
    frequency: float
    presence: float
    repetition: float
    min_new_tokens: int
    stop_ids: Sequence[int]


def count_tokens(counts: torch.Tensor | None, new_tokens: Sequence[int], vocab_size: int, device: str) -> torch.Tensor:
    """Add tokens to a request's counts; ``counts`` None starts from nothing. Returns ``[V] float32``."""
    if counts is None:
        counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
    if len(new_tokens):
        index = to_device(torch.tensor(list(new_tokens), dtype=torch.int64), device)
        counts.index_add_(0, index, torch.ones_like(index, dtype=torch.float32))
    return counts


def apply_penalties(logits: torch.Tensor, drafts: torch.Tensor, rows: Sequence[PenaltyRow]) -> None:
    """Penalise in place.

    Parameters
    ----------
    logits : Tensor, ``[B, K + 1, V]``
    drafts : Tensor, ``[B, K] int64``
        ``drafts[:, j]`` is what position ``j + 1`` continues.
    rows : sequence of PenaltyRow
        The others are left alone.
    """
    if not rows:
        return
    device = logits.device.type
    index = to_device(torch.tensor([row.row for row in rows]), device)
    strengths = torch.tensor([[row.frequency, row.presence, row.repetition] for row in rows], dtype=torch.float32)
    frequency, presence, repetition = to_device(strengths.T.contiguous(), device).view(3, -1, 1, 1)
    counts = _chunk_counts(torch.stack([row.counts for row in rows]), drafts[index])
    penalised = logits[index].float()
    penalised -= counts * frequency
    seen = counts > 0
    penalised -= seen * presence
    scaled = torch.where(penalised < 0, penalised * repetition, penalised / repetition)
    penalised = torch.where(seen, scaled, penalised)
    _forbid_stops(penalised, rows)
    logits[index] = penalised.to(logits.dtype)


def _chunk_counts(counts: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Counts at each position of a chunk: ``[R, V]`` and drafts ``[R, K]`` give ``[R, K + 1, V]``."""
    num_steps = drafts.shape[1]
    chunk = counts.unsqueeze(1).repeat(1, num_steps + 1, 1)
    if num_steps:
        before = torch.ones(num_steps + 1, num_steps, device=counts.device).tril(diagonal=-1)
        at = drafts.unsqueeze(1).expand(-1, num_steps + 1, -1)
        chunk.scatter_add_(2, at, before.expand_as(at).contiguous())
    return chunk


def _forbid_stops(penalised: torch.Tensor, rows: Sequence[PenaltyRow]) -> None:
    for i, row in enumerate(rows):
        positions = min(penalised.shape[1], row.min_new_tokens - row.num_generated)
        stops = [token for token in row.stop_ids if 0 <= token < penalised.shape[2]]
        if positions > 0 and stops:
            index = to_device(torch.tensor(stops, dtype=torch.int64), penalised.device.type)
            penalised[i, :positions].index_fill_(1, index, float("-inf"))
