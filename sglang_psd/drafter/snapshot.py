"""The open requests as arrays: what a round needs is looked up for all of its requests at once.

The states (``rows.py``) stay the truth. An entry is taken from its state while nobody waits and holds until that state
changes; a round whose requests are all well known is laid out by a few array operations, its states follow while the
device drafts. Any other round goes the long way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from sglang_psd.channel.messages import RoundRow
from sglang_psd.drafter.chain import CATCH_UP
from sglang_psd.drafter.columns import Columns, Kinds
from sglang_psd.drafter.packed import SAMPLED, SEEDED, unpack_sampling
from sglang_psd.drafter.rows import DraftState

# Stand for "no token" on either side of a comparison: never equal.
_NO_DRAFT, _NO_TOKEN = -1, -2


@dataclass(frozen=True)
class Layout:
    """A chain's inputs, one entry per request.

    Attributes
    ----------
    rows, lens, previous, last : ndarray, ``[R] int64``
        As in ``Columns``.
    constants : ndarray, ``[R, 3] int64``
        Kind, top-k and seed.
    laws : ndarray, ``[R, 3] float32``
        Temperature, top-p, min-p.
    width : int
        Tokens that a request misses at most.
    """

    rows: np.ndarray
    lens: np.ndarray
    previous: np.ndarray
    last: np.ndarray
    constants: np.ndarray
    laws: np.ndarray
    width: int

    def fill(self, columns: Columns) -> Kinds:
        """As ``Columns.fill``."""
        count, kinds = len(self.rows), self.constants[:, 0]
        ints, floats = columns.clear(count)
        ints[0, :count], ints[1, :count] = self.rows, self.lens
        ints[2, :count], ints[3, :count] = self.previous, self.last
        ints[4:, :count], floats[:, :count] = self.constants.T, self.laws.T
        return Kinds(bool((kinds == SAMPLED).any()), bool((kinds == SEEDED).any()))

    def sampled(self) -> list[int]:
        """Requests whose drafts come with a law."""
        return np.flatnonzero(self.constants[:, 0] == SAMPLED).tolist()


class Snapshot:
    """Entries by row of the request table.

    Parameters
    ----------
    num_rows : int
        Of the table, without its padding row.
    num_steps : int
        Drafts of a chain, at most.
    context_len, vocab_size : int
        Of the draft model.
    """

    def __init__(self, num_rows: int, num_steps: int, context_len: int, vocab_size: int):
        entries = num_rows + 1
        self._num_steps, self._context_len, self._vocab_size = num_steps, context_len, vocab_size
        # Committed tokens, tokens with KV, the last committed token.
        self._facts = np.zeros((entries, 3), dtype=np.int64)
        self._drafts = np.full((entries, num_steps), _NO_DRAFT, dtype=np.int64)
        self._constants = np.zeros((entries, 3), dtype=np.int64)
        self._laws = np.ones((entries, 3), dtype=np.float32)

    def note(self, state: DraftState) -> None:
        """Take what stands in ``state``, which has a row of the table."""
        row, tokens, fed, length = state.pool_row, state.tokens, state.fed, len(state.tokens)
        self._facts[row] = length, len(fed), tokens[-1]
        drafts = fed[length : length + self._num_steps]
        self._drafts[row] = drafts + [_NO_DRAFT] * (self._num_steps - len(drafts))
        constants, laws = unpack_sampling([state.packed])
        self._constants[row], self._laws[row] = constants[0], laws[0]
        state.noted = True

    def lay_out(self, states: Sequence[DraftState], rows: Sequence[RoundRow], num_steps: int) -> Layout | None:
        """Inputs of a chain of ``num_steps`` drafts once the tokens of ``rows`` are committed.

        ``states``, one for each row, are noted now where they were not. None when something is out of the ordinary: a
        request is out of step, misses more than a chain's first step takes, or lacks room in pool or context.
        """
        if not states or any(state.pool_row < 0 for state in states):
            return None
        for state in states:
            if not state.noted:
                self.note(state)
        at = np.array([state.pool_row for state in states], dtype=np.int64)
        counts = np.array([len(row.new_tokens) for row in rows], dtype=np.int64)
        tokens = np.array(list(chain.from_iterable([row.new_tokens for row in rows])), dtype=np.int64)
        if counts.min() < 1 or counts.max() > self._num_steps + 1 or tokens.max() >= self._vocab_size:
            return None
        known, fed, last_known = self._facts[at].T
        lens = known + counts
        room = np.minimum([state.num_slots for state in states], self._context_len)
        if (lens != [row.base_len for row in rows]).any() or (lens + num_steps > room).any():
            return None
        gained = np.full((len(at), self._num_steps + 1), _NO_TOKEN, dtype=np.int64)
        gained[np.arange(self._num_steps + 1) < counts[:, None]] = tokens
        # Drafts that were fed count as far as they agree; the last committed token is always fed again.
        agreed = np.logical_and.accumulate(gained[:, :-1] == self._drafts[at], axis=1).sum(axis=1)
        fed = np.minimum(np.where(fed >= known, known + agreed, fed), lens - 1)
        width = int((lens - fed).max())
        if width > CATCH_UP:
            return None
        each = np.arange(len(at))
        previous = np.where(counts > 1, gained[each, counts - 2], last_known)
        last = gained[each, counts - 1]
        return Layout(at, lens, previous, last, self._constants[at], self._laws[at], width)
