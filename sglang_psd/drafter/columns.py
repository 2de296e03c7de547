"""What one chain needs to know about its rows, packed so that it reaches the device in two copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_psd.drafter.packed import SAMPLED, SEEDED, unpack_sampling
from sglang_psd.drafter.rows import Pooled

# Row of each quantity in the two packed arrays.
_INTS = ("rows", "lens", "previous", "last", "kinds", "top_k", "seeds")
_FLOATS = ("temperature", "top_p", "min_p")


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

    @classmethod
    def empty(cls, num_rows: int, device: str, *, pinned: bool = False) -> Columns:
        """Columns of padding rows: pool row 0 (SGLang's padding row), length 1, greedy."""
        columns = cls(
            torch.zeros(len(_INTS), num_rows, dtype=torch.int64, device=device, pin_memory=pinned),
            torch.ones(len(_FLOATS), num_rows, dtype=torch.float32, device=device, pin_memory=pinned),
        )
        columns.lens.fill_(1)
        return columns

    def clear(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Write padding behind the first ``count`` rows (host tensors only); returns both arrays for the others."""
        ints, floats = self.ints.numpy(), self.floats.numpy()
        ints[:, count:], floats[:, count:] = 0, 1.0
        ints[1, count:] = 1
        return ints, floats

    def fill(self, states: Sequence[Pooled]) -> Kinds:
        """Write the given requests into the first rows (host tensors only) and padding into the rest."""
        count = len(states)
        ints, floats = self.clear(count)
        tokens = [state.tokens for state in states]
        ints[0, :count] = [state.pool_row for state in states]
        ints[1, :count] = [len(each) for each in tokens]
        ints[2, :count] = [each[-2] if len(each) > 1 else 0 for each in tokens]
        ints[3, :count] = [each[-1] for each in tokens]
        constant, law = unpack_sampling([state.packed for state in states])
        ints[4:, :count], floats[:, :count] = constant.T, law.T
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
