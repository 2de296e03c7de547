"""Who may be pushed out for a request of higher priority."""

from __future__ import annotations

from types import SimpleNamespace as Made
from typing import Any

import pytest

from sglang_psd.scheduler.room import preempts_here

ARGS = Made(schedule_low_priority_values_first=False)


def request(priority: int, streaming: bool = False, session: bool = False) -> Any:
    kept = Made(streaming=streaming) if session or streaming else None
    return Made(priority=priority, time_stats=Made(wait_queue_entry_time=0.0), session=kept, finished=lambda: False)


def adder(rows: int, *running: Any, admitted: int = 0) -> Any:
    table = Made(available_size=lambda: rows)
    batch = Made(reqs=list(running), req_to_token_pool=table)
    return Made(running_batch=batch, can_run_list=[None] * admitted, preempt_list=[])


@pytest.mark.parametrize(
    ("rows", "admitted", "running", "may"),
    [
        (0, 0, [request(1)], True),
        (0, 0, [request(1, session=True)], True),
        (0, 0, [request(1, streaming=True)], False),
        (0, 0, [request(5), request(1, streaming=True)], False),
        (1, 0, [request(1, streaming=True)], True),
        (2, 2, [request(1, streaming=True)], False),
    ],
)
def test_what_gives_way_has_to_free_a_row(rows: int, admitted: int, running: list, may: bool) -> None:
    """A turn of a streaming session that is pushed out keeps its row of the request table."""
    assert preempts_here(adder(rows, *running, admitted=admitted), [], None, ARGS) is may


@pytest.mark.parametrize(("own", "others", "may"), [([3], [5], True), ([3], [1], False), ([], [], False)])
def test_the_least_important_of_all_slots_is_here(own: list[int], others: list[int], may: bool) -> None:
    found = preempts_here(adder(4, *map(request, own)), [request(priority) for priority in others], None, ARGS)
    assert found is may


def test_whoever_is_left_to_the_other_slot_pushes_nobody_out_here() -> None:
    assert not preempts_here(adder(4, request(1), admitted=2), [], 2, ARGS)
