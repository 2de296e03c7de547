"""Who may write where in a ring of rows: arithmetic only."""

from __future__ import annotations


class RowRing:
    """Space in a ring of ``capacity`` rows, seen from the writer.

    Positions count all rows ever reserved, so that "everything before position p has been read" is one number. A run of
    rows is never split: where it would cross the end of the ring, the rest of the ring is left out.

    Parameters
    ----------
    capacity : int
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._written = 0
        self._read = 0

    def reserve(self, rows: int) -> tuple[int, int] | None:
        """Take a run of ``rows``.

        Returns
        -------
        (offset, end) or None
            Index of its first row, and the position after its last one; None when there is no room.
        """
        start = self._written % self.capacity
        skipped = self.capacity - start if start + rows > self.capacity else 0
        if rows > self.capacity or self._written + skipped + rows - self._read > self.capacity:
            return None
        self._written += skipped + rows
        return (0 if skipped else start), self._written

    def release(self, end: int) -> None:
        """The reader is done with everything before position ``end``."""
        self._read = max(self._read, min(end, self._written))
