"""The k-step loop: catch-up, then one draft after the other, each fed to the model again.

A *step* feeds one token per row and draws the next one. The step after the last draws nothing: it only feeds the last
draft, while the target verifies, so that a chain accepted as a whole leaves nothing to catch up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sglang_psd.drafter.columns import Columns, Kinds
from sglang_psd.drafter.proposals import draw_proposals
from sglang_psd.transfer import to_host

# decode(rows, lens, ids) -> logits [R, V]: feed one token per row, ``lens`` include it; all ``[R] int64``.
Decode = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# What one step draws: tokens [R], and ids and probabilities [R, M] of its laws, None when no row is sampled.
Drawn = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

# How often a request can stand in the first step: once for each token that misses its KV.
CATCH_UP = 2


@dataclass
class HostChain:
    """Drafts of a batch on the host.

    Attributes
    ----------
    tokens : ndarray, ``[R, K] int64``
    law_ids, law_probs : ndarray or None, ``[R, K, M]``, int64 and float32
        Laws of the sampled rows; None when there are none.
    """

    tokens: np.ndarray
    law_ids: np.ndarray | None
    law_probs: np.ndarray | None


@dataclass
class Chain:
    """Drafts of a batch on the device, step after step.

    Attributes
    ----------
    tokens : Tensor, ``[K, R] int64``
    law_ids, law_probs : Tensor, ``[K, R, M]``, int64 and float32
        Laws of the sampled rows; not written when there are none.
    """

    tokens: torch.Tensor
    law_ids: torch.Tensor
    law_probs: torch.Tensor

    @classmethod
    def empty(cls, num_steps: int, num_rows: int, law_size: int, device: str) -> Chain:
        """Room for ``num_steps`` drafts a row and laws over ``law_size`` tokens."""
        law = (num_steps, num_rows, law_size)
        return cls(
            torch.zeros(num_steps, num_rows, dtype=torch.int64, device=device),
            torch.zeros(law, dtype=torch.int64, device=device),
            torch.zeros(law, dtype=torch.float32, device=device),
        )

    @property
    def num_steps(self) -> int:
        """K."""
        return len(self.tokens)

    @property
    def law_size(self) -> int:
        """M."""
        return self.law_ids.shape[-1]

    def put(self, step: int, drawn: Drawn) -> None:
        """Keep what ``draw_proposals`` returned."""
        tokens, law_ids, law_probs = drawn
        self.tokens[step].copy_(tokens)
        if law_ids is not None and law_probs is not None:
            self.law_ids[step].copy_(law_ids)
            self.law_probs[step].copy_(law_probs)

    def to_host(self, kinds: Kinds, count: int) -> HostChain:
        """Bring the first ``count`` rows to the host, and wait for them once."""
        wanted = [self.tokens, *((self.law_ids, self.law_probs) if kinds.sampled else ())]
        tokens, *laws = to_host([tensor[:, :count] for tensor in wanted])
        law_ids, law_probs = (law.swapaxes(0, 1) for law in laws) if laws else (None, None)
        return HostChain(tokens.swapaxes(0, 1), law_ids, law_probs)


def step_batch(columns: Columns, step: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and lengths of a step's batch, ``[width R] int64`` each.

    A request misses the KV of its last committed token and, when all drafts were accepted and the last one was not fed
    in time, of the one before. Both are fed in one step then (``width`` 2): the first half of the batch holds the
    tokens before, the second half the last ones. Each layer writes the KV of the whole batch before it attends, so the
    second half sees the first. A token that was there already is written again, with the same value.
    """
    rows, lens = columns.rows, columns.lens
    if width == 1:
        return rows, lens + step if step else lens
    before = torch.where(lens > 1, rows, 0)  # a request of one token: the pool's padding row
    return torch.cat([before, rows]), torch.cat([(lens - 1).clamp(min=1), lens])


def run_step(
    decode: Decode,
    columns: Columns,
    chain: Chain,
    kinds: Kinds,
    uniforms: torch.Tensor | None,
    step: int,
    width: int,
    vocab_limit: int,
) -> None:
    """Feed a token per row and put the next one into ``chain``; nothing is drawn when the chain is full.

    KV slots for positions below ``lens + step`` must have been reserved. Device operations of fixed shape only, apart
    from what ``decode`` does.

    Parameters
    ----------
    decode : callable
    columns : Columns
        On the device; ``R`` rows.
    chain : Chain
        Holds the drafts of the steps before.
    kinds : Kinds
    uniforms : Tensor or None, ``[K, R] float64``
    step : int
    width : int
        How often each request stands in the batch, see ``step_batch``.
    vocab_limit : int
        Ids from here on are never drafted.
    """
    if step:
        ids = chain.tokens[step - 1]
    else:
        ids = columns.last if width == 1 else torch.cat([columns.previous, columns.last])
    logits = decode(*step_batch(columns, step, width), ids)
    if step == chain.num_steps:
        return
    logits = logits[-len(columns.rows) :, :vocab_limit]
    noise = None if uniforms is None else uniforms[step]
    chain.put(step, draw_proposals(logits, columns, kinds, columns.lens + step, noise, chain.law_size))
