"""A round whose requests all go on as expected, laid out before their states know of it.

The first kernel of a chain waits for this. So nothing is written here, and every request is looked at once: one loop
over a batch beats array operations, whose code is cold after a target's verify. The states (``rows.py``) follow while
the device drafts. Any other round goes the long way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_psd.channel.messages import RoundRow
from sglang_psd.drafter.chain import CATCH_UP
from sglang_psd.drafter.columns import Columns, Kinds
from sglang_psd.drafter.rows import DraftState


@dataclass(frozen=True)
class Layout:
    """A chain's inputs, one entry per request.

    Attributes
    ----------
    rows, lens, previous, last : list of int
        As in ``Columns``.
    packed : list of bytes
        Sampling parameters (``pack_sampling``).
    width : int
        Tokens that a request misses at most.
    """

    rows: list[int]
    lens: list[int]
    previous: list[int]
    last: list[int]
    packed: list[bytes]
    width: int

    def fill(self, columns: Columns) -> Kinds:
        """As ``Columns.fill``."""
        return columns.write((self.rows, self.lens, self.previous, self.last), self.packed)


def lay_out(
    states: Sequence[DraftState | None],
    rows: Sequence[RoundRow],
    num_steps: int,
    context_len: int,
    vocab_size: int,
) -> Layout | None:
    """Inputs of a chain of ``num_steps`` drafts once the tokens of ``rows`` are committed.

    Parameters
    ----------
    states : sequence of DraftState or None
        One for each row.
    rows : sequence of RoundRow
    num_steps : int
    context_len, vocab_size : int
        Of the draft model.

    Returns
    -------
    Layout or None
        None when something is out of the ordinary: a request is unknown or out of step, misses more than a chain's
        first step takes, or lacks room in pool or context.
    """
    places, lens, previous, last, packed, width = [], [], [], [], [], 1
    for state, row in zip(states, rows):
        new, length = row.new_tokens, row.base_len
        if state is None or state.pool_row < 0 or not new:
            return None
        known, fed = len(state.tokens), len(state.fed)
        room = min(state.num_slots, context_len)
        if known + len(new) != length or length + num_steps > room or max(new) >= vocab_size:
            return None
        if fed >= known:
            # Drafts that were fed count as far as they agree; the last committed token is always fed again.
            beyond, fed = state.fed[known : length - 1], known
            for draft, token in zip(beyond, new):
                if draft != token:
                    break
                fed += 1
        missing = length - fed
        if missing > CATCH_UP:
            return None
        width = max(width, missing)
        places.append(state.pool_row)
        lens.append(length)
        previous.append(new[-2] if len(new) > 1 else state.tokens[-1])
        last.append(new[-1])
        packed.append(state.packed)
    return Layout(places, lens, previous, last, packed, width) if places else None
