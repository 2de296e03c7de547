"""From what a chain drew to the message that carries it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_psd.channel.messages import PROB, TOKEN, Proposals, RoundRow
from sglang_psd.drafter.chain import HostChain


@dataclass(frozen=True)
class Laws:
    """Laws that go with a message: those at ``places`` of a chain belong to its rows ``rows``."""

    chain: HostChain | None
    rows: list[int]
    places: list[int]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """``[len(rows), K, M]``, int32 ids and float32 probabilities; empty where there are none."""
        if not self.rows or self.chain is None or self.chain.law_ids is None or self.chain.law_probs is None:
            return np.zeros(0, TOKEN), np.zeros(0, PROB)
        return self.chain.law_ids[self.places].astype(TOKEN), self.chain.law_probs[self.places].astype(PROB)


def make_proposals(
    round_id: int,
    rows: Sequence[RoundRow],
    counts: list[int],
    tokens: np.ndarray,
    laws: Laws,
    times: tuple[float, float],
) -> Proposals:
    """The answer to a round, finished now.

    Parameters
    ----------
    round_id : int
    rows : sequence of RoundRow
    counts : list of int
        Drafts of each row; a row whose law holds a NaN gets none.
    tokens : ndarray, ``[len(rows), K]``
        0 behind a row's last draft.
    laws : Laws
    times : (float, float)
        When the round was received and when it was begun, seconds of ``time.monotonic``.
    """
    law_ids, law_probs = laws.arrays()
    sampled = laws.rows
    if not np.isfinite(law_probs).all():
        # A draft model that computes no numbers for one request: the others keep their drafts.
        whole = np.isfinite(law_probs).all(axis=(1, 2))
        counts = list(counts)
        for row in itertools.compress(sampled, ~whole):
            counts[row] = 0
        sampled, law_ids, law_probs = list(itertools.compress(sampled, whole)), law_ids[whole], law_probs[whole]
    return Proposals(
        round_id=round_id,
        rids=[row.rid for row in rows],
        base_lens=[row.base_len for row in rows],
        counts=counts,
        num_steps=tokens.shape[1],
        tokens=tokens.astype(TOKEN, copy=False).tobytes(),
        sampled=sampled,
        top_m=law_ids.shape[-1] if sampled else 0,
        law_ids=law_ids.tobytes(),
        law_probs=law_probs.tobytes(),
        received_s=times[0],
        started_s=times[1],
        finished_s=time.monotonic(),
    )
