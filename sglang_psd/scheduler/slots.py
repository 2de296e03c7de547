"""Who belongs in which slot: pure arithmetic over slot sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """Take ``count`` requests out of slot ``source`` into slot ``target``."""

    source: int
    target: int
    count: int


def next_turn(turn: int, num_slots: int) -> int:
    """Slots take turns; with one slot every turn is its own."""
    return (turn + 1) % num_slots


def admission_share(sizes: Sequence[int], slot: int, waiting: int) -> int:
    """How many waiting requests slot ``slot`` may admit so that the slots end up equal.

    The larger half goes to whoever asks first; never negative.

    >>> admission_share([0, 0], 0, 7), admission_share([4, 0], 1, 3), admission_share([5, 2], 0, 1)
    (4, 3, 0)
    """
    total = sum(sizes) + waiting
    fair = -(-total // len(sizes))
    return max(0, min(waiting, fair - sizes[slot]))


def plan_move(sizes: Sequence[int], min_parallel: int, threshold: int) -> Move | None:
    """Even out two slots, or empty the smaller one when two would not pay.

    Parameters
    ----------
    sizes : sequence of int
        Running requests per slot.
    min_parallel : int
        With fewer requests than this in all, one slot is enough.
    threshold : int
        Smallest difference worth a move.

    >>> plan_move([7, 0], 2, 2), plan_move([4, 3], 2, 2), plan_move([1, 1], 4, 2)
    (Move(source=0, target=1, count=3), None, Move(source=1, target=0, count=1))
    """
    if len(sizes) < 2:
        return None
    large, small = (0, 1) if sizes[0] >= sizes[1] else (1, 0)
    if sum(sizes) < min_parallel:
        return Move(small, large, sizes[small]) if sizes[small] else None
    difference = sizes[large] - sizes[small]
    return Move(large, small, difference // 2) if difference >= threshold else None
