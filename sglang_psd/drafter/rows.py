"""What the drafter knows about each open request: pure bookkeeping, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sglang_psd.channel.messages import Sampling
from sglang_psd.drafter.packed import pack_sampling


class Pooled(Protocol):
    """An open request as pools and sampling see it, whatever is fed to the model."""

    rid: str
    sampling: Sampling
    packed: bytes
    tokens: list[int]
    pool_row: int
    num_slots: int

    @property
    def num_fed(self) -> int:
        """How many tokens have KV in the pool."""

    def forget_kv(self) -> None:
        """Nothing of this request stands in the pool any more."""


@dataclass
class DraftState:
    """One open request.

    Attributes
    ----------
    rid : str
    sampling : Sampling
    tokens : list of int
        Committed tokens, prompt included.
    fed : list of int
        Tokens whose KV stands in the pool, by position: committed ones, then drafts that may turn out wrong.
    pool_row : int
        Row of the request table; -1 while none is assigned.
    num_slots : int
        KV slots written into that row.
    packed : bytes
        ``sampling`` as a chain's columns take it (``pack_sampling``).
    """

    rid: str
    sampling: Sampling
    tokens: list[int]
    fed: list[int] = field(default_factory=list)
    pool_row: int = -1
    num_slots: int = 0
    packed: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.packed = pack_sampling(self.sampling)

    def commit(self, new_tokens: Sequence[int], base_len: int) -> bool:
        """Append committed tokens and drop KV that they contradict.

        Returns False, changing nothing, when ``base_len`` says that a message was lost: the request is of no use
        until it is opened again. A row that came twice is taken once.
        """
        known = len(self.tokens)
        if known == base_len and self.tokens[base_len - len(new_tokens) :] == list(new_tokens):
            new_tokens = ()
        if known + len(new_tokens) != base_len:
            return False
        self.tokens.extend(new_tokens)
        # A row taken before may have been drafted for: what was fed beyond it goes, too.
        self._drop_contradicted(known)
        return True

    def _drop_contradicted(self, start: int) -> None:
        """Keep the fed tokens that agree with the committed ones.

        The last committed token is always fed again: its logits start the next chain.
        """
        fed, tokens = self.fed, self.tokens
        agreed, limit = min(start, len(fed)), min(len(fed), len(tokens) - 1)
        while agreed < limit and fed[agreed] == tokens[agreed]:
            agreed += 1
        del fed[min(agreed, limit) :]

    def forget_kv(self) -> None:
        """Nothing of this request stands in the pool any more."""
        self.pool_row, self.num_slots = -1, 0
        self.fed.clear()

    def note_fed(self, count: int) -> None:
        """Remember that the next ``count`` committed tokens have been fed."""
        self.fed.extend(self.tokens[len(self.fed) : len(self.fed) + count])

    def note_chain(self, drafts: Sequence[int]) -> None:
        """Remember what a chain has fed: the committed tokens that were missing, and all drafts but the last."""
        self.note_fed(self.missing)
        self.fed.extend(drafts[:-1])

    def note_last(self, draft: int) -> None:
        """Remember that the last draft of the chain has been fed, too."""
        self.fed.append(draft)

    @property
    def num_fed(self) -> int:
        """How many tokens have KV in the pool."""
        return len(self.fed)

    @property
    def missing(self) -> int:
        """Committed tokens whose KV is not there yet (at least 1 when tokens exist)."""
        return len(self.tokens) - len(self.fed)
