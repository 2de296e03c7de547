"""The k-step loop: catch-up, then one draft after the other, each fed to the model again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_psd.drafter.columns import Columns, Kinds
from sglang_psd.drafter.proposals import draw_proposals

# decode(step, rows, lens, ids) -> logits [R, V]: feed one token per row, ``lens`` include it; all ``[R] int64``.
Decode = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# What one step draws: tokens [R], and ids and probabilities [R, M] of its laws, None when no row is sampled.
Drawn = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass
class Chain:
    """Drafts of a batch.

    Attributes
    ----------
    tokens : Tensor, ``[R, K] int64``
    law_ids, law_probs : Tensor or None, ``[R, K, M]``, int64 and float32
        Laws of the sampled rows; None when there are none.
    """

    tokens: torch.Tensor
    law_ids: torch.Tensor | None
    law_probs: torch.Tensor | None

    @classmethod
    def of_steps(cls, steps: list[Drawn]) -> Chain:
        """Put what ``draw_proposals`` returned at each step side by side."""
        tokens, law_ids, law_probs = zip(*steps)
        if law_ids[0] is None:
            return cls(torch.stack(tokens, dim=1), None, None)
        return cls(torch.stack(tokens, dim=1), torch.stack(law_ids, dim=1), torch.stack(law_probs, dim=1))


def first_batch(columns: Columns) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, lengths and ids of the first step, ``[2 R] int64`` each: every request stands in it twice.

    A request misses the KV of its last committed token, and of the one before if all drafts were accepted. Both are
    fed in one step: the first half of the batch holds the tokens before, the second half the last ones. Each layer
    writes the KV of the whole batch before it attends, so the second half sees the first. A token that was there
    already is written again, with the same value.
    """
    rows, lens = columns.rows, columns.lens
    before = torch.where(lens > 1, rows, 0)  # a request of one token: the pool's padding row
    return (
        torch.cat([before, rows]),
        torch.cat([(lens - 1).clamp(min=1), lens]),
        torch.cat([columns.previous, columns.last]),
    )


def run_chain(
    decode: Decode,
    columns: Columns,
    kinds: Kinds,
    uniforms: torch.Tensor | None,
    num_steps: int,
    vocab_limit: int,
    top_m: int,
) -> Chain:
    """Draft ``num_steps`` tokens for each row.

    KV slots for positions below ``lens + num_steps - 1`` must have been reserved. Device operations of fixed shape
    only, apart from what ``decode`` does.

    Parameters
    ----------
    decode : callable
    columns : Columns
        On the device; ``R`` rows.
    kinds : Kinds
    uniforms : Tensor or None, ``[K, R] float64``
    num_steps, vocab_limit, top_m : int
        Ids from ``vocab_limit`` on are never drafted.

    Returns
    -------
    Chain
    """
    count = len(columns.rows)
    rows, lens, ids = first_batch(columns)
    drawn: list[Drawn] = []
    for step in range(num_steps):
        logits = decode(step, rows, lens, ids)[-count:, :vocab_limit]
        rows, lens = columns.rows, columns.lens + step + 1
        drawn.append(
            draw_proposals(logits, columns, kinds, lens - 1, None if uniforms is None else uniforms[step], top_m)
        )
        ids = drawn[-1][0]
    return Chain.of_steps(drawn)
