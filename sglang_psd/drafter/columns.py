"""What one chain needs to know about its rows, packed so that it reaches the device in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_psd.drafter.packed import SAMPLED, SEEDED, unpack_sampling
from sglang_psd.drafter.rows import Pooled
from sglang_psd.transfer import to_device

# Row of each quantity in the two packed arrays.
_INTS = ("rows", "lens", "previous", "last", "kinds", "top_k", "seeds")
_FLOATS = ("temperature", "top_p", "min_p")
_ROW_BYTES = 8 * len(_INTS) + 4 * len(_FLOATS)


@dataclass(frozen=True)
class Kinds:
    """Which kinds of row a batch holds: host facts, so that nothing is computed for kinds that are absent."""

    sampled: bool = False
    seeded: bool = False


@dataclass
class Columns:
    """Inputs of a chain, one entry per row.

    Attributes
    ----------
    ints : Tensor, ``[7, R] int64``
        Row of the request table; committed length; last but one and last committed token; kind, top-k and seed
        (``packed``).
    floats : Tensor, ``[3, R] float32``
        Temperature, top-p, min-p.
    """

    ints: torch.Tensor
    floats: torch.Tensor
    _bytes: torch.Tensor  # both, side by side

    @classmethod
    def empty(cls, num_rows: int, device: str, *, pinned: bool = False) -> Columns:
        """Columns of padding rows: pool row 0 (SGLang's padding row), length 1, greedy."""
        columns = cls._over(torch.zeros(num_rows * _ROW_BYTES, dtype=torch.uint8, device=device, pin_memory=pinned))
        columns.floats.fill_(1.0)
        columns.lens.fill_(1)
        return columns

    @classmethod
    def _over(cls, both: torch.Tensor) -> Columns:
        num_ints = len(both) // _ROW_BYTES * len(_INTS) * 8
        ints, floats = both[:num_ints].view(torch.int64), both[num_ints:].view(torch.float32)
        return cls(ints.view(len(_INTS), -1), floats.view(len(_FLOATS), -1), both)

    def on(self, device: str) -> Columns:
        """A copy on ``device``, without waiting for it."""
        return self._over(to_device(self._bytes, device))

    def copy_(self, other: Columns) -> None:
        """Take over what stands in other columns of this size, in one copy and without waiting for the device."""
        self._bytes.copy_(other._bytes, non_blocking=True)

    def fill(self, states: Sequence[Pooled]) -> Kinds:
        """Write the given requests into the first rows (host tensors only) and padding into the rest."""
        tokens = [state.tokens for state in states]
        rows = [state.pool_row for state in states]
        lens = [len(each) for each in tokens]
        previous = [each[-2] if len(each) > 1 else 0 for each in tokens]
        last = [each[-1] for each in tokens]
        return self.write((rows, lens, previous, last), [state.packed for state in states])

    def write(self, ints: tuple[list[int], ...], packed: Sequence[bytes]) -> Kinds:
        """As ``fill``: the first four rows of ``ints``, and the sampling parameters of each request."""
        count, all_ints, all_floats = len(packed), self.ints.numpy(), self.floats.numpy()
        all_ints[:, count:], all_floats[:, count:] = 0, 1.0
        all_ints[1, count:] = 1
        all_ints[:4, :count] = ints
        constant, law = unpack_sampling(packed)
        all_ints[4:, :count], all_floats[:, :count] = constant.T, law.T
        kinds = constant[:, 0].tolist()
        return Kinds(SAMPLED in kinds, SEEDED in kinds)

    @property
    def rows(self) -> torch.Tensor:
        """``[R] int64``."""
        return self.ints[0]

    @property
    def lens(self) -> torch.Tensor:
        """``[R] int64``, the last committed token included."""
        return self.ints[1]

    @property
    def previous(self) -> torch.Tensor:
        """``[R] int64``; 0 where there is only one token."""
        return self.ints[2]

    @property
    def last(self) -> torch.Tensor:
        """``[R] int64``."""
        return self.ints[3]

    @property
    def kinds(self) -> torch.Tensor:
        """``[R] int64``."""
        return self.ints[4]

    @property
    def top_k(self) -> torch.Tensor:
        """``[R, 1] int64``."""
        return self.ints[5].unsqueeze(1)

    @property
    def seeds(self) -> torch.Tensor:
        """``[R] int64``."""
        return self.ints[6]

    @property
    def temperature(self) -> torch.Tensor:
        """``[R, 1] float32``."""
        return self.floats[0].unsqueeze(1)

    @property
    def top_p(self) -> torch.Tensor:
        """``[R, 1] float32``."""
        return self.floats[1].unsqueeze(1)

    @property
    def min_p(self) -> torch.Tensor:
        """``[R, 1] float32``."""
        return self.floats[2].unsqueeze(1)


# Writes a batch into columns on the host, padding included.
Fill = Callable[[Columns], Kinds]
