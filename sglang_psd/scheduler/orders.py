"""Which drafts are on their way, which have arrived, and how a verify takes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sglang_psd.channel.draft_rows import DraftBatch
from sglang_psd.channel.messages import RoundRow
from sglang_psd.scheduler.answers import Arrival, Taken

# One request of a verify: its id, its committed length, and how many drafts it can use at most.
Wish = tuple[str, int, int]


class Orders:
    """By request: a request has one order at a time, for the length it was committed to last.

    Parameters
    ----------
    num_steps : int
        Drafts per request, at most.
    """

    def __init__(self, num_steps: int):
        self._num_steps = num_steps
        self._asked: dict[str, int] = {}  # id -> committed length that the drafts are to continue
        self._arrived: dict[str, tuple[Arrival, int]] = {}  # id -> its row of a message
        self._awaited: set[str] = set()

    def place(self, rows: Iterable[RoundRow]) -> None:
        """Drafts have been asked for; what came for these requests before is of no use any more."""
        self._asked.update([(row.rid, row.base_len) for row in rows])
        for row in rows if self._arrived else ():
            self._arrived.pop(row.rid, None)

    def is_for(self, rid: str, base_len: int) -> bool:
        """Whether drafts that continue this length are asked for."""
        return self._asked.get(rid) == base_len

    def deliver(self, arrival: Arrival) -> bool:
        """Keep those rows of a message that somebody asked for; whether there are any."""
        asked, table = self._asked, arrival.table
        fits = {
            rid: (arrival, row)
            for row, (rid, base_len) in enumerate(zip(table.rids, table.base_lens))
            if asked.get(rid) == base_len
        }
        self._arrived.update(fits)
        self._awaited.difference_update(fits)
        return bool(fits)

    def expected(self, wanted: Sequence[Wish | None]) -> set[str]:
        """Those requests of a verify that drafts were asked for."""
        asked = self._asked
        return {item[0] for item in wanted if item is not None and asked.get(item[0]) == item[1]}

    def await_all(self, rids: Iterable[str]) -> set[str]:
        """Those of ``rids`` whose drafts are still to come: the set shrinks as they do and as requests leave."""
        self._awaited = {rid for rid in rids if rid in self._asked and rid not in self._arrived}
        return self._awaited

    def take(self, wanted: Sequence[Wish | None], expected: set[str]) -> Taken:
        """Drafts of one verify, out of the messages that they came in; all requests of a message at once."""
        if (whole := self._whole_message(wanted, expected)) is not None:
            for rid in expected:
                del self._asked[rid], self._arrived[rid]
            arrival, limits = whole
            return Taken.whole(arrival, self._num_steps, limits)
        taken = Taken(DraftBatch.empty(len(wanted), self._num_steps))
        arrivals: list[Arrival] = []
        for place, item in enumerate(wanted):
            if item is None or item[0] not in expected:
                continue
            rid, base_len, limit = item
            asked, found = self._asked.pop(rid, None), self._arrived.pop(rid, None)
            if found is None:
                taken.late += asked is not None
                continue
            arrival, row = found
            if limit < 1 or arrival.table.base_lens[row] != base_len:
                continue
            if not arrival.picks:
                arrivals.append(arrival)
            arrival.picks.append((place, row, limit))
        for arrival in arrivals:
            taken.add(arrival)
        return taken

    def _whole_message(self, wanted: Sequence[Wish | None], expected: set[str]) -> tuple[Arrival, Sequence[int]] | None:
        """The message whose rows are ``wanted``, each as it was asked for, and how many drafts each can use.

        None where it is not as simple as that: requests without drafts, drafts that came in several messages or not.
        """
        if not expected or len(expected) != len(wanted) or not self._arrived.keys() >= expected:
            return None
        everybody = [item for item in wanted if item is not None]
        table = self._arrived[everybody[0][0]][0].table
        if table.rids != [rid for rid, _, _ in everybody] or table.base_lens != [length for _, length, _ in everybody]:
            return None
        return self._arrived[everybody[0][0]][0], [limit for _, _, limit in everybody]

    def forget(self, rid: str) -> None:
        """A request ended or left."""
        self._asked.pop(rid, None)
        self._arrived.pop(rid, None)
        self._awaited.discard(rid)

    def clear(self) -> None:
        """Every request has."""
        self._asked.clear()
        self._arrived.clear()
        self._awaited.clear()
