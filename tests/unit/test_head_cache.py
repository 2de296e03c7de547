"""What is kept of ended requests, and for whom it is of use."""

from __future__ import annotations

import torch

from sglang_psd.channel.messages import Sampling
from sglang_psd.drafter.head_cache import EndedRequests, common_beginning
from sglang_psd.drafter.head_rows import HeadState

GREEDY = Sampling(True, 1.0, 1, 1.0, 0.0, None)


def state(tokens: list[int], known: int, fed: int, start: int = 0, ahead: tuple[int, ...] = ()) -> HeadState:
    made = HeadState("x", GREEDY, list(tokens), start, start, known, fed, ahead=list(ahead), num_slots=fed)
    made.waiting = [torch.zeros(known - fed, 2)] if known > fed else []
    return made


class Bench:
    def __init__(self) -> None:
        self.released: list[HeadState] = []
        self.ended = EndedRequests(self.released.append)


def test_a_position_needs_the_token_after_it() -> None:
    bench = Bench()
    kept = state([1, 2, 3, 4, 5], known=4, fed=4)
    bench.ended.keep(kept, 4)
    assert bench.ended.find(state([1, 2, 3, 4, 9], 0, 0), 3, ()) == (kept, 3)
    assert bench.ended.find(state([1, 2, 3, 4, 9], 0, 0), 4, ()) == (kept, 3), "position 3 was fed with another token"
    assert bench.ended.find(state([7, 2, 3], 0, 0), 3, ()) is None
    assert bench.ended.slots == 4


def test_the_longest_beginning_wins_and_holes_count() -> None:
    bench = Bench()
    short, long = state([1, 2, 3, 8, 8], 4, 4), state([1, 2, 3, 4, 5], 4, 4)
    holed = state([1, 2, 3, 4, 5, 6], 3, 3, start=2)
    holed.solid = 3
    for kept in (long, short, holed):
        bench.ended.keep(kept, 4)
    assert bench.ended.find(state([1, 2, 3, 4, 5, 6], 0, 0), 4, ()) == (long, 4)
    bench.ended.evict()
    assert bench.released == [long]
    assert bench.ended.find(state([1, 2, 3, 4, 5, 6], 0, 0), 5, ()) == (holed, 5)
    assert bench.ended.find(state([1, 2, 3, 9], 0, 0), 3, ()) == (short, 2), "a hole beyond what agrees"


def test_common_beginning() -> None:
    for count in range(9):
        one, other = list(range(9)), [*range(count), *[99] * (9 - count)]
        assert common_beginning(one, other, 20) == count
        assert common_beginning(one, other, 4) == min(count, 4)
    assert common_beginning([], [1], 5) == 0 and common_beginning([1, 2], [1, 2, 3], 5) == 2


def test_the_last_round_counts() -> None:
    """The request ended with tokens that were never committed; their hidden states wait."""
    bench = Bench()
    kept = state([1, 2, 3], known=4, fed=2, ahead=(4, 5))
    bench.ended.keep(kept, 4)
    assert kept.tokens == [1, 2, 3, 4, 5] and kept.feedable == 2
    assert bench.ended.find(state([1, 2, 3, 4, 5, 6], 0, 0), 4, ()) == (kept, 4)


def test_what_is_not_kept() -> None:
    bench = Bench()
    useless = state([1, 2, 3], 2, 0)
    bench.ended.keep(useless, 4)
    assert bench.released.pop() is useless
    long = state(list(range(20)), known=19, fed=4)
    bench.ended.keep(long, 4)
    assert (long.known, long.waiting) == (4, []), "hidden states of a prompt nobody read are dropped"


def test_the_oldest_goes_first_and_use_counts() -> None:
    bench = Bench()
    a, b = state([1, 2, 3], 2, 2), state([4, 5, 6], 2, 2)
    bench.ended.keep(a, 4)
    bench.ended.keep(b, 4)
    with bench.ended.in_use(a):
        assert bench.ended.evict() and bench.released == [b]
        assert not bench.ended.evict(), "what is in use was evicted"
    assert bench.ended.states == [a]
    bench.ended.clear()
    assert bench.released == [b, a] and not bench.ended.evict()
    with bench.ended.in_use(b):
        pass
    assert bench.ended.states == [], "a request that runs was kept"


def test_running_requests_are_asked_too() -> None:
    bench = Bench()
    running = state([1, 2, 3, 4], 3, 3)
    asking = state([1, 2, 3, 9], 0, 0)
    assert bench.ended.find(asking, 2, [asking, running]) == (running, 2)
    assert bench.ended.find(running, 2, [running]) is None, "a request is no help to itself"


def test_what_waits_holds_on_to_nothing_else() -> None:
    """Rows come as parts of a message for many requests; a kept part must not keep the whole."""
    bench = Bench()
    kept = state([1, 2, 3, 4, 5, 6], known=5, fed=3)
    kept.waiting = [torch.ones(4000, 2)[7:9]]
    bench.ended.keep(kept, 4)
    assert [piece.untyped_storage().nbytes() for piece in kept.waiting] == [2 * 2 * 4]
    assert kept.waiting[0].tolist() == [[1.0, 1.0]] * 2
