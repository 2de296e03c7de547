"""What target and drafter do alike with a law: cut it, draw from it."""

from __future__ import annotations

import torch


def cut_law(ordered: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor) -> torch.Tensor:
    """Apply top-k, top-p and min-p together and renormalise.

    Parameters
    ----------
    ordered : Tensor, ``[..., V] float32``
        Probabilities in descending order.
    top_ks, top_ps, min_ps : Tensor
        Broadcast against ``ordered``.

    Returns
    -------
    Tensor, ``[..., V] float32``
    """
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    # A sum that rounds above 1 must not cut the tail of a law that is not to be cut.
    keep = (ordered.cumsum(dim=-1) - ordered <= top_ps) | (top_ps >= 1.0)
    keep &= rank < top_ks
    keep &= ordered >= ordered[..., :1] * min_ps
    kept = torch.where(keep, ordered, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def draw_from(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw; ``weights`` ``[B, V]`` need not sum to 1, ``uniforms`` ``[B]`` in [0, 1).

    A token of weight 0 is never drawn.
    """
    cdf = weights.double().cumsum(dim=-1)
    total = cdf[:, -1:]
    # u * total may round up to total, where nothing of the CDF lies above it.
    below = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniforms.double().view(-1, 1) * total, below)
    # Weights that are not numbers (a padding row's) must not lead to an index that does not exist.
    return torch.searchsorted(cdf, threshold, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)
