"""What the drafter knows about each open request when it is an EAGLE head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_psd.channel.messages import Sampling
from sglang_psd.drafter.packed import pack_sampling


@dataclass(eq=False)
class HeadState:
    """One open request.

    The head's context begins where hidden states begin: positions that the target found in its prefix cache, or that it
    passed before this process knew the request, have none.

    Attributes
    ----------
    rid : str
    sampling : Sampling
    tokens : list of int
        Committed tokens, prompt included.
    start : int
        Positions left out: those before the first hidden state, and where a beginning was taken over from another
        request (``head_cache.py``) those between it and the first hidden state.
    solid : int
        From this position on none is left out.
    known : int
        Hidden states received, or taken over as KV; the last one is that of position ``start + known - 1``.
    fed : int
        How many of them have been fed; their KV stands in the pool.
    waiting : list of Tensor
        Those received and not fed, ``[n, feature_size]`` each.
    ahead : list of int
        Tokens gained with the last hidden states and not committed yet.
    pool_row, num_slots, packed : int, int, bytes
        As in ``DraftState``.
    """

    rid: str
    sampling: Sampling
    tokens: list[int]
    start: int = 0
    solid: int = 0
    known: int = 0
    fed: int = 0
    waiting: list[Any] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    pool_row: int = -1
    num_slots: int = 0
    packed: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.packed = pack_sampling(self.sampling)

    def commit(self, new_tokens: Sequence[int], base_len: int) -> bool:
        """Append committed tokens; False, changing nothing, when ``base_len`` says that a message was lost."""
        if len(self.tokens) + len(new_tokens) != base_len:
            return False
        self.tokens.extend(new_tokens)
        self.ahead = []
        # Hidden states of tokens that were cut off afterwards: the target will send others for these positions.
        self.keep_below(len(self.tokens) - 1)
        return True

    def receive(self, first: int, rows: Any) -> bool:
        """Take over hidden states of the positions from ``first`` on.

        Returns False where they do not continue what is known: the context has begun anew then, and KV in the pool
        is of no use.
        """
        continues = self.known > 0 and self.start + self.fed <= first <= self.start + self.known
        if continues:
            self.keep_below(first)
        else:
            self.begin_anew(first)
        self.waiting.append(rows)
        self.known += len(rows)
        return continues

    def begin_anew(self, first: int) -> None:
        """Drop the context; the next hidden state is that of position ``first``."""
        self.start, self.solid, self.known, self.fed = first, first, 0, 0
        self.waiting.clear()

    def forget_kv(self) -> None:
        """Nothing of this request stands in the pool any more; what waits can still be fed."""
        self.pool_row, self.num_slots = -1, 0
        self.start, self.known, self.fed = self.start + self.fed, self.known - self.fed, 0
        self.solid = self.start

    def keep_below(self, position: int) -> None:
        """Forget hidden states that wait for positions from ``position`` on."""
        surplus = self.start + self.known - position
        while surplus > 0 and self.waiting:
            last = self.waiting.pop()
            if len(last) > surplus:
                self.waiting.append(last[: len(last) - surplus])
            self.known -= min(surplus, len(last))
            surplus -= len(last)

    def own_waiting(self) -> None:
        """Copy the rows that wait: a part of a message holds on to all of it."""
        self.waiting = [piece.clone() for piece in self.waiting]

    def take(self, count: int) -> list[Any]:
        """The next ``count`` waiting rows, as pieces; they count as fed."""
        pieces, self.fed = [], self.fed + count
        while count:
            piece = self.waiting.pop(0)
            if len(piece) > count:
                self.waiting.insert(0, piece[count:])
                piece = piece[:count]
            pieces.append(piece)
            count -= len(piece)
        return pieces

    def note_chain(self, drafts: Sequence[int]) -> None:
        """Drafts leave nothing behind that counts: their KV is made from the head's own guesses."""

    @property
    def num_fed(self) -> int:
        """How many positions have KV in the pool."""
        return self.fed

    @property
    def num_waiting(self) -> int:
        """Hidden states received and not fed."""
        return self.known - self.fed

    @property
    def feedable(self) -> int:
        """Waiting rows whose next token, which is fed with them, is committed."""
        return min(self.known, len(self.tokens) - 1 - self.start) - self.fed

    @property
    def complete(self) -> bool:
        """Whether a chain can start: hidden states up to the token before the last, one of them to be fed."""
        return self.feedable > 0 and self.start + self.known == len(self.tokens) - 1
