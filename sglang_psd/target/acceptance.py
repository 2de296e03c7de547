"""Which drafts become output: the acceptance rule, twice.

``accept_chain_reference`` is the rule as one reads it in the paper (Leviathan et al. 2023, Algorithm 1;
Chen et al. 2023, Algorithm 2), one request at a time. ``accept_chain`` is the same rule for a whole batch
without a device synchronisation; the tests hold one against the other and both against the exact law.

Three kinds of row share a batch:

* greedy: the target's choice is the argmax (first index wins a tie);
* seeded: the target's choice is drawn with noise that depends on seed and position only;
* sampled: a draft ``d`` drawn from ``q`` is accepted with probability ``min(1, p(d) / q(d))``, a rejected
  one is replaced by a draw from ``max(p - q, 0)`` renormalised.

For the first two a draft is accepted exactly when it equals the target's choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_psd.law import cut_law, draw_from
from sglang_psd.noise import gumbel_argmax


@dataclass
class VerifyRows:
    """Per-request inputs of one acceptance call; ``B`` requests, ``K`` draft columns.

    Attributes
    ----------
    drafts : Tensor, ``[B, K] int64``
        Padding columns hold any valid token id.
    num_drafts : Tensor, ``[B] int64``
        How many of them are real.
    law_ids, law_probs : Tensor or None, ``[B, K, M]``, int64 and float32
        Sparse proposal law; padded with probability 0. None when no row is sampled.
    uniforms : Tensor, ``[B, K + 1] float32``
        In [0, 1): one per draft, the last one for the draw at the end.
    deterministic : Tensor, ``[B] bool``
        Greedy and seeded rows.
    """

    drafts: torch.Tensor
    num_drafts: torch.Tensor
    law_ids: torch.Tensor | None
    law_probs: torch.Tensor | None
    uniforms: torch.Tensor
    deterministic: torch.Tensor


@dataclass
class Filters:
    """Sampling parameters, ``[B]`` each; ``seeds`` counts where ``seeded``.

    ``any_sampled``, ``any_seeded`` and ``any_filter`` are host facts, so that nothing has to be read back
    from the device to skip work.
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    greedy: torch.Tensor
    seeded: torch.Tensor
    seeds: torch.Tensor
    any_sampled: bool
    any_seeded: bool
    any_filter: bool


def filtered_probs(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The law tokens are drawn from: temperature, then top-k, top-p and min-p together.

    Same rule as SGLang's ``top_k_top_p_min_p_sampling_from_probs_torch``: the three cuts look at the
    same temperature-scaled law; what is left is renormalised.

    Parameters
    ----------
    logits : Tensor, ``[B, N, V]`` of any float dtype

    Returns
    -------
    Tensor, ``[B, N, V] float32``
    """
    if filters.any_filter and logits.is_cuda:
        from sglang_psd.kernels import filtered_law

        return filtered_law(logits, filters.temperatures, filters.top_ks, filters.top_ps, filters.min_ps)
    return filtered_probs_reference(logits, filters)


def filtered_probs_reference(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """``filtered_probs`` in plain PyTorch."""
    probs = torch.softmax(logits.float() / filters.temperatures.view(-1, 1, 1), dim=-1)
    if not filters.any_filter:
        return probs
    ordered, index = probs.sort(dim=-1, descending=True)
    top_ks, top_ps, min_ps = (x.view(-1, 1, 1) for x in (filters.top_ks, filters.top_ps, filters.min_ps))
    kept = cut_law(ordered, top_ks, top_ps, min_ps)
    return torch.empty_like(probs).scatter_(-1, index, kept)


def target_choice(
    logits: torch.Tensor, probs: torch.Tensor | None, filters: Filters, positions: torch.Tensor
) -> torch.Tensor:
    """What greedy and seeded rows emit at each position.

    Parameters
    ----------
    logits : Tensor, ``[B, N, V]``
    probs : Tensor or None, ``[B, N, V] float32``
    positions : Tensor, ``[B, N] int64``
        Index of the drawn token in its sequence (prompt included).

    Returns
    -------
    Tensor, ``[B, N] int64``
    """
    choice = torch.argmax(logits, dim=-1)
    if filters.any_seeded and probs is not None:
        drawn = gumbel_argmax(probs, filters.seeds.view(-1, 1), positions)
        choice = torch.where((filters.seeded & ~filters.greedy).view(-1, 1), drawn, choice)
    return choice


def accept_chain(
    rows: VerifyRows, choice: torch.Tensor, probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the acceptance rule to a batch.

    Parameters
    ----------
    rows : VerifyRows
    choice : Tensor, ``[B, K + 1] int64``
        ``target_choice``; read for deterministic rows.
    probs : Tensor or None, ``[B, K + 1, V] float32``
        Filtered target law; None when every row is deterministic.

    Returns
    -------
    tokens : Tensor, ``[B, K + 1] int64``
        The first ``lengths[b]`` columns are row ``b``'s output; what follows is undefined.
    lengths : Tensor, ``[B] int32``
        Accepted drafts plus the one token that the target adds.
    """
    num_steps = rows.drafts.shape[1]
    accepted = rows.drafts == choice[:, :num_steps]
    if probs is not None and num_steps:
        p = probs[:, :num_steps].gather(-1, rows.drafts.unsqueeze(-1)).squeeze(-1)
        q = _law_at_drafts(rows)
        accepted = torch.where(rows.deterministic.view(-1, 1), accepted, rows.uniforms[:, :num_steps] * q < p)
    column = torch.arange(num_steps, device=rows.drafts.device)
    accepted = accepted & (column < rows.num_drafts.view(-1, 1))
    num_accepted = accepted.long().cumprod(dim=-1).sum(dim=-1)
    last = choice.gather(1, num_accepted.view(-1, 1)).squeeze(-1)
    if probs is not None:
        drawn = draw_from(_last_law(rows, probs, num_accepted), rows.uniforms[:, -1])
        last = torch.where(rows.deterministic, last, drawn)
    tokens = torch.cat([rows.drafts, last.view(-1, 1)], dim=1)
    tokens = tokens.scatter(1, num_accepted.view(-1, 1), last.view(-1, 1))
    return tokens, (num_accepted + 1).to(torch.int32)


def _law_at_drafts(rows: VerifyRows) -> torch.Tensor:
    """``q(d)`` of each draft, ``[B, K] float32``; 1 where no law came along."""
    if rows.law_ids is None or rows.law_probs is None:
        return torch.ones_like(rows.drafts, dtype=torch.float32)
    return torch.where(rows.law_ids == rows.drafts.unsqueeze(-1), rows.law_probs, 0.0).sum(dim=-1)


def _last_law(rows: VerifyRows, probs: torch.Tensor, num_accepted: torch.Tensor) -> torch.Tensor:
    """Weights of the final draw, ``[B, V]``: the residual after a rejection, else the target's law."""
    vocab_size = probs.shape[-1]
    law = probs.gather(1, num_accepted.view(-1, 1, 1).expand(-1, 1, vocab_size)).squeeze(1)
    num_steps = rows.drafts.shape[1]
    if not num_steps:
        return law
    column = num_accepted.clamp(max=num_steps - 1).view(-1, 1, 1)
    if rows.law_ids is None or rows.law_probs is None:
        ids = rows.drafts.unsqueeze(-1).gather(1, column).squeeze(1)
        q = torch.ones_like(ids, dtype=torch.float32)
    else:
        width = rows.law_ids.shape[-1]
        ids = rows.law_ids.gather(1, column.expand(-1, 1, width)).squeeze(1)
        q = rows.law_probs.gather(1, column.expand(-1, 1, width)).squeeze(1)
    residual = law.scatter_add(1, ids, -q).clamp_(min=0.0)
    # p == q up to rounding leaves nothing to draw from; a rejection then has probability ~0 anyway.
    rejected = (num_accepted < rows.num_drafts) & (residual.sum(dim=-1) > 0)
    return torch.where(rejected.view(-1, 1), residual, law)


def accept_chain_reference(
    drafts: list[int],
    p: torch.Tensor,
    q: torch.Tensor,
    uniforms: list[float],
    choice: list[int] | None = None,
) -> list[int]:
    """The rule for one request, to be read and to be tested against.

    Parameters
    ----------
    drafts : list of int
        ``n`` proposed tokens.
    p : Tensor, ``[n + 1, V] float64``
        Target law at each position.
    q : Tensor, ``[n, V] float64``
        Law each draft was drawn from.
    uniforms : list of float
        ``n`` accept tests, then the final draw.
    choice : list of int, optional
        Tokens that a greedy or seeded row emits; None for a sampled row.

    Returns
    -------
    list of int
        Accepted drafts and the token that the target adds.
    """
    for i, draft in enumerate(drafts):
        if choice is not None:
            if draft != choice[i]:
                return [*drafts[:i], choice[i]]
        elif not uniforms[i] * q[i, draft] < p[i, draft]:
            residual = (p[i] - q[i]).clamp(min=0)
            return [*drafts[:i], _draw_one(residual if residual.sum() > 0 else p[i], uniforms[-1])]
    last = choice[len(drafts)] if choice is not None else _draw_one(p[-1], uniforms[-1])
    return [*drafts, last]


def _draw_one(weights: torch.Tensor, uniform: float) -> int:
    total, running = float(weights.sum()), 0.0
    last_possible = 0
    for token, weight in enumerate(weights.tolist()):
        if weight > 0:
            running += weight
            last_possible = token
            if running > uniform * total:
                return token
    return last_possible
