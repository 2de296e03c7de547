"""Turning draft logits into proposals and the law they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_psd.channel.messages import Sampling
from sglang_psd.law import cut_law, draw_from
from sglang_psd.noise import gumbel_argmax


@dataclass
class ProposalSampler:
    """Draws one token per row and step; rows of all kinds share a batch.

    Greedy rows take the argmax. Seeded rows take the argmax under the noise the target will use. Sampled rows draw
    from their ``top_m`` most likely tokens, cut further by the request's own top-k, top-p and min-p and renormalised:
    that is the exact law which travels with the token, so acceptance stays exact whatever was cut.

    Parameters
    ----------
    rows : sequence of Sampling
    top_m : int
    device : str
    generator : torch.Generator
        On ``device``; its state never influences the output law.
    """

    rows: Sequence[Sampling]
    top_m: int
    device: str
    generator: torch.Generator

    def __post_init__(self) -> None:
        kinds = [(i, r.seed is not None) for i, r in enumerate(self.rows) if not r.greedy]
        self.sampled = [i for i, seeded in kinds if not seeded]
        self.seeded = [i for i, seeded in kinds if seeded]
        # Nothing is copied to the device for kinds of row that the batch does not have.
        if self.sampled:
            chosen = [self.rows[i] for i in self.sampled]
            self._sampled_index = self._tensor(self.sampled, torch.int64)
            self._temperature = self._tensor([r.temperature for r in chosen], torch.float32).view(-1, 1)
            self._top_k = self._tensor([min(r.top_k, self.top_m) for r in chosen], torch.int64).view(-1, 1)
            self._top_p = self._tensor([r.top_p for r in chosen], torch.float32).view(-1, 1)
            self._min_p = self._tensor([r.min_p for r in chosen], torch.float32).view(-1, 1)
        if self.seeded:
            chosen = [self.rows[i] for i in self.seeded]
            self._seeded_index = self._tensor(self.seeded, torch.int64)
            self._seeds = self._tensor([r.seed or 0 for r in chosen], torch.int64)
            self._seeded_temperature = self._tensor([r.temperature for r in chosen], torch.float32).view(-1, 1)

    def _tensor(self, values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)

    def draw(
        self, logits: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """One step.

        Parameters
        ----------
        logits : Tensor, ``[R, V]``
        positions : Tensor, ``[R] int64``
            Index in the sequence of the token being drawn.

        Returns
        -------
        tokens : Tensor, ``[R] int64``
        law_ids, law_probs : Tensor or None, ``[S, M]`` int64 and float32
            Law of the sampled rows, in the order of ``sampled``.
        """
        tokens = torch.argmax(logits, dim=-1)
        if self.seeded:
            scaled = logits[self._seeded_index].float() / self._seeded_temperature
            drawn = gumbel_argmax(torch.softmax(scaled, -1), self._seeds, positions[self._seeded_index])
            tokens = tokens.index_copy(0, self._seeded_index, drawn)
        if not self.sampled:
            return tokens, None, None
        law_ids, law_probs = self._sparse_law(logits[self._sampled_index])
        drawn = self._draw_sparse(law_ids, law_probs)
        return tokens.index_copy(0, self._sampled_index, drawn), law_ids, law_probs

    def _sparse_law(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        top, ids = logits.float().topk(min(self.top_m, logits.shape[-1]), dim=-1)
        probs = torch.softmax(top / self._temperature, dim=-1)
        return ids, cut_law(probs, self._top_k, self._top_p, self._min_p)

    def _draw_sparse(self, ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        uniforms = torch.rand(len(ids), dtype=torch.float64, device=ids.device, generator=self.generator)
        return ids.gather(1, draw_from(probs, uniforms).view(-1, 1)).squeeze(1)
