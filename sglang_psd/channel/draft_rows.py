"""Drafts as arrays: what one ``Proposals`` message holds, and what one verify takes out of such messages.

Nothing here is done request by request where it can be done for all of them: it stands between the drafter's answer and
the target's first kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_psd.channel.arrays import PROB, TOKEN
from sglang_psd.channel.messages import Proposals


class ProposalTable:
    """Arrays of one ``Proposals`` message (views of its bytes).

    Attributes
    ----------
    rids : list of str
    base_lens : list of int
        Committed length that each row continues.
    counts : ndarray, ``[R] int64``
        Drafts of each row.
    tokens : ndarray, ``[R, K] int32``
    law_of : ndarray or None, ``[R] int64``
        Index of each row's law, -1 where its drafts were certain; None when all were.
    law_ids, law_probs : ndarray, ``[L, K, M]``, int32 and float32
        Only where there are laws.
    """

    law_ids: np.ndarray
    law_probs: np.ndarray

    def __init__(self, message: Proposals):
        rows, steps = len(message.rids), message.num_steps
        self.rids = message.rids
        self.base_lens = message.base_lens
        self.counts = np.array(message.counts, dtype=np.int64)
        self.tokens = np.frombuffer(message.tokens, TOKEN).reshape(rows, steps)
        self.law_of: np.ndarray | None = None
        if message.sampled:
            shape = (len(message.sampled), steps, message.top_m)
            self.law_ids = np.frombuffer(message.law_ids, TOKEN).reshape(shape)
            self.law_probs = np.frombuffer(message.law_probs, PROB).reshape(shape)
            self.law_of = np.full(rows, -1, dtype=np.int64)
            self.law_of[message.sampled] = np.arange(len(message.sampled))


@dataclass(frozen=True)
class DraftRow:
    """Drafts of one request.

    Attributes
    ----------
    base_len : int
        Committed length they continue.
    tokens : ndarray, ``[count] int32``
    law_ids, law_probs : ndarray or None, ``[count, M]``
        The sparse law each token was drawn from; None means that the token was certain.
    """

    base_len: int
    tokens: np.ndarray
    law_ids: np.ndarray | None = None
    law_probs: np.ndarray | None = None


@dataclass
class DraftBatch:
    """Drafts of one verify; ``B`` requests, ``K`` draft columns.

    Attributes
    ----------
    base_lens, counts : ndarray, ``[B] int64``
        Committed length of each request; how many drafts it has.
    tokens : ndarray, ``[B, K] int32``
        0 behind a request's last draft.
    lawful : ndarray, ``[B] bool``
        Requests whose drafts came with a law; those of others were certain.
    law_ids, law_probs : ndarray or None, ``[B, K, M]``, int32 and float32
        None when no draft came with a law.
    """

    base_lens: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    lawful: np.ndarray
    law_ids: np.ndarray | None = None
    law_probs: np.ndarray | None = None

    @classmethod
    def empty(cls, num_requests: int, num_steps: int) -> DraftBatch:
        """No drafts for anybody."""
        return cls(
            np.zeros(num_requests, dtype=np.int64),
            np.zeros(num_requests, dtype=np.int64),
            np.zeros((num_requests, num_steps), dtype=TOKEN),
            np.zeros(num_requests, dtype=bool),
        )

    @classmethod
    def whole(cls, table: ProposalTable, num_steps: int, limits: Sequence[int]) -> DraftBatch:
        """All drafts of a message whose rows are the batch, ``limits[i]`` of row ``i``'s at most."""
        counts = np.minimum(table.counts, limits)
        size, steps = table.tokens.shape
        if table.law_of is not None or steps < num_steps:
            batch, each = cls.empty(size, num_steps), np.arange(size)
            batch.put(each, table, each, counts)
            return batch
        # Most chains are as long as can be and wanted as a whole.
        complete = int(counts.min(initial=num_steps)) == num_steps
        tokens = table.tokens if complete else np.where(np.arange(steps) < counts[:, None], table.tokens, 0)
        return cls(np.array(table.base_lens, dtype=np.int64), counts, tokens, np.zeros(size, dtype=bool))

    def __len__(self) -> int:
        return len(self.counts)

    def put(self, at: np.ndarray, table: ProposalTable, source: np.ndarray, limits: np.ndarray) -> None:
        """Give the requests at places ``at`` the drafts in rows ``source`` of a message, ``limits`` of them at most."""
        steps = table.tokens.shape[1]
        counts = np.minimum(table.counts[source], limits)
        real = np.arange(steps) < counts[:, None]
        self.counts[at] = counts
        self.base_lens[at] = np.array(table.base_lens, dtype=np.int64)[source]
        self.tokens[at, :steps] = np.where(real, table.tokens[source], 0)
        if table.law_of is None:
            return
        law = table.law_of[source]
        at, law = at[law >= 0], law[law >= 0]
        if len(law):
            self._put_laws(at, table.law_ids[law], table.law_probs[law])

    def _put_laws(self, at: np.ndarray, ids: np.ndarray, probs: np.ndarray) -> None:
        steps, width = ids.shape[1:]
        if self.law_ids is None or self.law_probs is None:
            shape = (*self.tokens.shape, width)
            self.law_ids, self.law_probs = np.zeros(shape, TOKEN), np.zeros(shape, PROB)
        elif width > self.law_ids.shape[-1]:
            more = ((0, 0), (0, 0), (0, width - self.law_ids.shape[-1]))
            self.law_ids, self.law_probs = np.pad(self.law_ids, more), np.pad(self.law_probs, more)
        self.lawful[at] = True
        self.law_ids[at, :steps, :width], self.law_probs[at, :steps, :width] = ids, probs

    def laws(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Laws of all drafts, ``[B, K, M]`` int64 ids and float32 probabilities; None when all were certain.

        Where others came with a law, a certain draft has one that knows nothing else.
        """
        if self.law_ids is None or self.law_probs is None:
            return None
        ids, probs = self.law_ids.astype(np.int64), self.law_probs.copy()
        certain = ~self.lawful
        ids[certain, :, 0] = self.tokens[certain]
        probs[certain, :, 0] = np.arange(self.tokens.shape[1]) < self.counts[certain, None]
        return ids, probs

    def row(self, index: int) -> DraftRow | None:
        """Drafts of one request (views); None when it has none."""
        count = int(self.counts[index])
        if not count:
            return None
        base_len, tokens = int(self.base_lens[index]), self.tokens[index, :count]
        if self.law_ids is None or self.law_probs is None or not self.lawful[index]:
            return DraftRow(base_len, tokens)
        return DraftRow(base_len, tokens, self.law_ids[index, :count], self.law_probs[index, :count])
