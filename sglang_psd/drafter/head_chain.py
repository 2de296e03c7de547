"""The k-step loop of an EAGLE head: the accepted tokens with the target's hidden states, then drafts with its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_psd.drafter.chain import Chain, Drawn
from sglang_psd.drafter.columns import Columns, Kinds
from sglang_psd.drafter.head_rows import HeadState
from sglang_psd.drafter.proposals import draw_proposals

# decode(rows, lens, positions, ids, hidden) -> (logits [R, D], hidden [R, H]): feed one token per row.
HeadDecode = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Vocabulary:
    """What a head can propose.

    Attributes
    ----------
    limit : int
        Ids of the target that may be proposed are below it.
    ids : Tensor or None, ``[D] int64``
        The target's id of every entry of a reduced vocabulary; None when the head's ids are the target's.
    """

    limit: int
    ids: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """How many tokens can be proposed."""
        return self.limit if self.ids is None else len(self.ids)


@dataclass
class HeadColumns:
    """Inputs of a chain, one entry per request.

    Attributes
    ----------
    base : Columns
        ``lens`` counts committed tokens; ``previous`` and ``last`` are not used.
    extra : Tensor, ``[2 + W, R] int64``
        Positions fed so far, positions to feed now (1 to ``W``), and their tokens, the last one in the last row.
        Fewer than ``W`` stand at the end, and the first of them fills the places before.
    """

    base: Columns
    extra: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, width: int, device: str, *, pinned: bool = False) -> HeadColumns:
        """Columns of padding rows."""
        extra = torch.zeros(2 + width, num_rows, dtype=torch.int64, device=device, pin_memory=pinned)
        extra[1] = 1
        return cls(Columns.empty(num_rows, device, pinned=pinned), extra)

    def fill(self, states: Sequence[HeadState]) -> tuple[Kinds, list[int]]:
        """Write the given requests into the first columns (host tensors only) and padding into the rest.

        Returns
        -------
        (Kinds, list of int)
            What to draw, and which of the requests' waiting rows, counted through, belongs in each place: ``W``
            lists of ``R``, one after the other.
        """
        kinds = self.base.fill(states)
        extra, width = self.extra.numpy(), len(self.extra) - 2
        extra[:] = 0
        extra[1] = 1
        picks = [[0] * extra.shape[1] for _ in range(width)]
        begin = 0
        for i, state in enumerate(states):
            count, first = state.feedable, state.start + state.fed
            extra[0, i], extra[1, i] = state.fed, count
            for place in range(width):
                row = max(0, count - width + place)
                extra[2 + place, i] = state.tokens[first + row + 1]
                picks[place][i] = begin + row
            begin += count
        return kinds, [pick for place in picks for pick in place]

    def step_batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, lengths and positions of a step, ``[W R] int64`` each in the first one and ``[R]`` later.

        Each request stands in the first step ``W`` times, as in ``chain.step_batch``: a layer writes the KV of the
        whole batch before it attends. A position that stands in it twice is written twice, with the same value.
        """
        fed, count = self.extra[0], self.extra[1]
        if step:
            return self.base.rows, fed + count + step, self.base.lens + step - 2
        width = len(self.extra) - 2
        place = torch.arange(width, device=self.extra.device).view(-1, 1)
        row = (count - width + place).clamp(min=0)
        positions = (self.base.lens - 1 - count + row).clamp(min=0)  # padding has one token
        rows = self.base.rows.repeat(width)  # a copy: kernels read it without asking for strides
        return rows, (fed + row + 1).view(-1), positions.view(-1)


def run_head_step(
    decode: HeadDecode,
    columns: HeadColumns,
    hidden: torch.Tensor,
    chain: Chain,
    kinds: Kinds,
    uniforms: torch.Tensor | None,
    step: int,
    vocabulary: Vocabulary,
) -> torch.Tensor:
    """Feed a token per row, in the first step those that were accepted, and put the next one into ``chain``.

    Device operations of fixed shape only, apart from what ``decode`` does.

    Parameters
    ----------
    decode : callable
    columns : HeadColumns
        On the device; ``R`` rows.
    hidden : Tensor, ``[W R, feature_size]`` or ``[R, H]``
        The target's hidden states in the first step, then what the step before returned.
    chain : Chain
        Holds the drafts of the steps before.
    kinds : Kinds
    uniforms : Tensor or None, ``[K, R] float64``
    step : int
    vocabulary : Vocabulary

    Returns
    -------
    Tensor, ``[R, H]``
        The head's own hidden states.
    """
    ids = chain.tokens[step - 1] if step else columns.extra[2:].reshape(-1)
    logits, hidden = decode(*columns.step_batch(step), ids, hidden)
    count = columns.extra.shape[1]
    noise = None if uniforms is None else uniforms[step]
    positions = columns.base.lens + step
    chain.put(step, draw_mapped(logits[-count:], columns.base, kinds, positions, noise, chain.law_size, vocabulary))
    return hidden[-count:]


def draw_mapped(
    logits: torch.Tensor,
    columns: Columns,
    kinds: Kinds,
    positions: torch.Tensor,
    uniforms: torch.Tensor | None,
    top_m: int,
    vocabulary: Vocabulary,
) -> Drawn:
    """As ``draw_proposals``, from the head's vocabulary and in the target's ids."""
    known = vocabulary.ids
    if known is None:
        return draw_proposals(logits[:, : vocabulary.limit], columns, kinds, positions, uniforms, top_m)
    logits = logits[:, : len(known)]
    if kinds.seeded:
        # The noise shared with the target belongs to its ids.
        logits = logits.new_full((len(logits), vocabulary.limit), float("-inf")).index_copy(1, known, logits)
        return draw_proposals(logits, columns, kinds, positions, uniforms, min(top_m, len(known)))
    ids, law_ids, law_probs = draw_proposals(logits, columns, kinds, positions, uniforms, top_m)
    return known[ids], None if law_ids is None else known[law_ids], law_probs
