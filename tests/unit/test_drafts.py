"""The scheduler's side of the drafter, with a scripted drafter behind the channel."""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import pytest

from sglang_psd.channel import messages as m
from sglang_psd.errors import ProtocolError
from sglang_psd.scheduler.drafts import DraftAnswer, DraftClient

GREEDY = m.Sampling(greedy=True, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed=None)


class FakeChannel:
    """Keeps what is sent; hands out what the test puts in ``inbox`` (messages or exceptions)."""

    def __init__(self) -> None:
        self.sent: list[m.Message] = []
        self.inbox: deque = deque()
        self.full = False

    def send(self, message: m.Message) -> None:
        if self.full:
            raise ProtocolError("The drafter channel is full.")
        self.sent.append(message)

    def receive(self, timeout_s: float) -> m.Message | None:
        if not self.inbox:
            time.sleep(min(timeout_s, 0.005))
            return None
        item = self.inbox.popleft()
        if isinstance(item, Exception):
            raise item
        return item


class FakeProcess:
    """Alive until told otherwise."""

    def __init__(self) -> None:
        self.channel = FakeChannel()
        self.running = True

    def alive(self) -> bool:
        return self.running


class Bench:
    """A client, its fake drafter, and the answers it reported."""

    def __init__(self, timeout_s: float = 0.2) -> None:
        self.process = FakeProcess()
        self.channel = self.process.channel
        self.answers: list[DraftAnswer] = []
        self.client = DraftClient(self.process, 3, timeout_s, self.answers.append)  # type: ignore[arg-type]

    def begin(self, *rids: str, length: int = 5) -> int:
        """Open requests of ``length`` tokens and commit one more; returns the round's number."""
        for rid in rids:
            self.client.open(rid, list(range(length)), GREEDY)
        self.client.commit([m.RoundRow(rid, length + 1, [9]) for rid in rids])
        return self.channel.sent[-1].round_id  # type: ignore[union-attr]

    def answer(self, round_id: int, *rids: str, base_len: int = 6, tokens: tuple[int, ...] = (1, 2, 3), top_m: int = 0):
        """Let proposals arrive."""
        rows, steps = len(rids), 3
        count = len(tokens)
        padded = [*tokens, *[0] * (steps - count)]
        law = np.ones((rows, steps, top_m), m.TOKEN)
        self.channel.inbox.append(
            m.Proposals(
                round_id,
                list(rids),
                [base_len] * rows,
                [count] * rows,
                steps,
                np.array(padded * rows, m.TOKEN).tobytes(),
                list(range(rows)) if top_m else [],
                top_m,
                law.tobytes(),
                law.astype(m.PROB).tobytes(),
                1.0,
                2.0,
                3.0,
            )
        )


def tokens_of(row: m.DraftRow | None) -> list[int] | None:
    return None if row is None else row.tokens.tolist()


def test_round_trip() -> None:
    bench = Bench()
    number = bench.begin("a", "b")
    opened, _, asked = bench.channel.sent
    assert isinstance(opened, m.Open) and np.frombuffer(opened.tokens, m.TOKEN).tolist() == [0, 1, 2, 3, 4]
    assert isinstance(asked, m.Round) and asked.num_steps == 3 and [row.rid for row in asked.rows] == ["a", "b"]
    bench.answer(number, "a", "b")
    taken = bench.client.take([("a", 6, 9), None, ("b", 6, 9)])
    assert [tokens_of(row) for row in taken.rows] == [[1, 2, 3], None, [1, 2, 3]]
    assert taken.late == 0 and (taken.draft_start_s, taken.draft_end_s) == (2.0, 3.0)
    assert [answer.round_id for answer in bench.answers] == [number]
    # Drafts are used once.
    assert bench.client.take([("a", 6, 9)]).rows == [None]


def test_short_remainders_cut_the_chain() -> None:
    bench = Bench()
    bench.answer(bench.begin("a", "b"), "a", "b", top_m=4)
    taken = bench.client.take([("a", 6, 2), ("b", 6, 0)])
    row = taken.rows[0]
    assert row is not None and row.tokens.tolist() == [1, 2]
    assert row.law_ids is not None and row.law_ids.shape == (2, 4)
    assert row.law_probs is not None and row.law_probs.shape == (2, 4)
    assert taken.rows[1] is None


def test_late_drafts_are_counted_and_dropped() -> None:
    bench = Bench(timeout_s=0.05)
    number = bench.begin("a", "b")
    bench.answer(number, "a")
    started = time.monotonic()
    taken = bench.client.take([("a", 6, 9), ("b", 6, 9)])
    assert 0.04 < time.monotonic() - started < 1.0
    assert tokens_of(taken.rows[0]) == [1, 2, 3] and taken.rows[1] is None
    assert taken.late == 1 and taken.wait_s >= 0.04
    # The round went on without: what comes now continues a length that has passed.
    bench.client.commit([m.RoundRow("b", 7, [4])])
    bench.answer(number, "b")
    bench.answer(number + 1, "b", base_len=7, tokens=(5, 6, 7))
    assert tokens_of(bench.client.take([("b", 7, 9)]).rows[0]) == [5, 6, 7]


def test_nothing_is_awaited_that_was_not_asked() -> None:
    bench = Bench(timeout_s=30.0)
    bench.client.open("a", [1], GREEDY)
    started = time.monotonic()
    assert bench.client.take([("a", 1, 9), ("stranger", 4, 9)]).rows == [None, None]
    bench.begin("b")
    assert bench.client.take([("b", 99, 9)]).rows == [None], "drafts for another length"
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize("base_len", [5, 7])
def test_stale_drafts_are_not_used(base_len: int) -> None:
    bench = Bench(timeout_s=0.03)
    bench.answer(bench.begin("a"), "a", base_len=base_len)
    taken = bench.client.take([("a", 6, 9)])
    assert taken.rows == [None] and taken.late == 1


def test_empty_proposals_end_the_wait() -> None:
    """A request beyond the drafter's context or pool: no drafts, no delay, not late."""
    bench = Bench(timeout_s=30.0)
    bench.answer(bench.begin("a"), "a", tokens=())
    taken = bench.client.take([("a", 6, 9)])
    assert taken.rows == [None] and taken.late == 0


def test_closed_requests_are_forgotten() -> None:
    bench = Bench(timeout_s=30.0)
    number = bench.begin("a", "b")
    bench.client.close(["a", "never seen"])
    assert bench.channel.sent[-1] == m.Close(["a"])
    bench.answer(number, "a", "b")
    assert [tokens_of(row) for row in bench.client.take([("a", 6, 9), ("b", 6, 9)]).rows] == [None, [1, 2, 3]]
    sent = len(bench.channel.sent)
    bench.client.commit([m.RoundRow("a", 7, [1])])
    bench.client.close(["a"])
    assert len(bench.channel.sent) == sent, "the drafter hears of a request that it does not hold"
    bench.client.close_all()
    assert bench.client.open_requests == 0


def test_reopening_drops_old_drafts() -> None:
    """Retracted and admitted again at the same length: answers to the old life must not be mixed in."""
    bench = Bench(timeout_s=0.03)
    bench.answer(bench.begin("a"), "a")
    bench.client.poll()
    bench.client.open("a", list(range(6)), GREEDY)
    assert bench.client.take([("a", 6, 9)]).rows == [None]


def test_a_dead_drafter_ends_the_wait() -> None:
    bench = Bench(timeout_s=30.0)
    bench.begin("a")
    bench.process.running = False
    started = time.monotonic()
    assert bench.client.take([("a", 6, 9)]).rows == [None]
    assert time.monotonic() - started < 1.0
    assert not bench.client.usable and bench.client.failure
    assert bench.client.open_requests == 0
    # From here on every call is a no-op.
    sent = len(bench.channel.sent)
    bench.client.open("b", [1], GREEDY)
    bench.client.commit([m.RoundRow("b", 2, [1])])
    bench.client.close(["b"])
    assert len(bench.channel.sent) == sent and not bench.client.is_open("b")
    assert bench.client.take([("b", 2, 9)]).rows == [None]
    assert bench.client.ping(0.05) is None


def test_last_words_of_a_dead_drafter_count() -> None:
    bench = Bench(timeout_s=30.0)
    bench.answer(bench.begin("a"), "a")
    bench.process.running = False
    assert tokens_of(bench.client.take([("a", 6, 9)]).rows[0]) == [1, 2, 3]


def test_failures_and_nonsense() -> None:
    bench = Bench(timeout_s=0.5)
    number = bench.begin("a")
    bench.channel.inbox.extend([m.Failure("one message", fatal=False), ProtocolError("garbage")])
    bench.answer(number, "a")
    assert tokens_of(bench.client.take([("a", 6, 9)]).rows[0]) == [1, 2, 3]
    bench.channel.inbox.append(m.Failure("out of memory", fatal=True))
    bench.client.poll()
    assert bench.client.failure == "out of memory"


def test_a_full_channel_means_lost() -> None:
    bench = Bench()
    bench.begin("a")
    bench.channel.full = True
    bench.client.commit([m.RoundRow("a", 7, [1])])
    assert not bench.client.usable


def test_ping() -> None:
    bench = Bench()
    stats = m.Stats(0, 0, 10, 10, 0, 0)
    bench.channel.inbox.append(stats)
    assert bench.client.ping() == stats
    assert isinstance(bench.channel.sent[-1], m.Ping)
    assert bench.client.ping(0.02) is None


def test_a_stall_is_told_once_and_ends_with_a_useful_answer(caplog) -> None:
    """Answers to rounds that have moved on neither end the stall nor bring a second warning."""
    bench = Bench(timeout_s=0.02)
    stale = bench.begin("a")
    assert bench.client.take([("a", 6, 3)]).late == 1
    for length in range(7, 27):
        bench.client.commit([m.RoundRow("a", length, [9])])
        bench.answer(stale, "a", base_len=6)
        assert bench.client.take([("a", length, 3)]).late == 1
    assert sum("did not answer" in record.message for record in caplog.records) == 1
    bench.client.commit([m.RoundRow("a", 27, [9])])
    bench.answer(99, "a", base_len=27)
    assert bench.client.take([("a", 27, 3)]).late == 0
    assert not bench.client._stalled
