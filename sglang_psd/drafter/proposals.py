"""Turning draft logits into proposals and the law they were drawn from."""

from __future__ import annotations

import torch

from sglang_psd.drafter.columns import Columns, Kinds
from sglang_psd.drafter.packed import SAMPLED, SEEDED
from sglang_psd.law import cut_law, draw_from
from sglang_psd.noise import gumbel_argmax


def draw_proposals(
    logits: torch.Tensor,
    columns: Columns,
    kinds: Kinds,
    positions: torch.Tensor,
    uniforms: torch.Tensor | None,
    top_m: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Draw one token per row; rows of all kinds share a batch.

    Greedy rows take the argmax. Seeded rows take the argmax under the noise the target will use. Sampled rows draw
    from their ``top_m`` most likely tokens, cut further by the request's own top-k, top-p and min-p and renormalised:
    that is the exact law which travels with the token, so acceptance stays exact whatever was cut. Made of device
    operations of fixed shape only: a CUDA graph can hold it.

    Parameters
    ----------
    logits : Tensor, ``[R, V]``
    columns : Columns
        Of the ``R`` rows, on the device of ``logits``.
    kinds : Kinds
        Which of them occur.
    positions : Tensor, ``[R] int64``
        Index in the sequence of the token being drawn.
    uniforms : Tensor or None, ``[R] float64``
        In [0, 1), read for sampled rows; never influences the output's law.
    top_m : int

    Returns
    -------
    tokens : Tensor, ``[R] int64``
    law_ids, law_probs : Tensor or None, ``[R, min(top_m, V)]``, int64 and float32
        Law of the sampled rows (other rows hold what is of no use); None when there are none.
    """
    tokens = torch.argmax(logits, dim=-1)
    if kinds.seeded:
        probs = torch.softmax(logits.float() / columns.temperature, dim=-1)
        drawn = gumbel_argmax(probs, columns.seeds, positions)
        tokens = torch.where(columns.kinds == SEEDED, drawn, tokens)
    if not kinds.sampled or uniforms is None:
        return tokens, None, None
    top, law_ids = logits.float().topk(min(top_m, logits.shape[-1]), dim=-1)
    probs = torch.softmax(top / columns.temperature, dim=-1)
    law_probs = cut_law(probs, columns.top_k, columns.top_p, columns.min_p)
    drawn = law_ids.gather(1, draw_from(law_probs, uniforms).view(-1, 1)).squeeze(1)
    return torch.where(columns.kinds == SAMPLED, drawn, tokens), law_ids, law_probs
