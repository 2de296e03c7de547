"""What sampling parameters mean for drawing drafts, packed once a request: a round puts a batch of them together."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sglang_psd.channel.messages import Sampling

GREEDY, SAMPLED, SEEDED = 0, 1, 2

# Kind, top-k, seed; temperature, top-p, min-p.
_LAYOUT = np.dtype([("ints", "<i8", 3), ("floats", "<f4", 3)])

# Sampling asks for "no top-k" with numbers that need not fit into arithmetic with ranks.
_MOST = 1 << 30


def kind_of(sampling: Sampling) -> int:
    """How drafts are drawn: ``GREEDY``, ``SAMPLED`` or ``SEEDED``."""
    if sampling.greedy:
        return GREEDY
    return SAMPLED if sampling.seed is None else SEEDED


def pack_sampling(sampling: Sampling) -> bytes:
    """One request's parameters, as ``unpack_sampling`` reads them."""
    ints = (kind_of(sampling), min(sampling.top_k, _MOST), sampling.seed or 0)
    return np.array((ints, (sampling.temperature, sampling.top_p, sampling.min_p)), _LAYOUT).tobytes()


def unpack_sampling(packed: Iterable[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Parameters of a batch.

    Returns
    -------
    ints : ndarray, ``[B, 3] int64``
        Kind, top-k, seed (0 where there is none).
    floats : ndarray, ``[B, 3] float32``
        Temperature, top-p, min-p.
    """
    table = np.frombuffer(b"".join(packed), _LAYOUT)
    return table["ints"], table["floats"]
