"""The scheduler's side of the drafter, with a scripted drafter behind the channel."""

from __future__ import annotations

import time
from collections import deque

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_psd.channel import messages as m
from sglang_psd.channel.draft_rows import DraftRow
from sglang_psd.errors import ProtocolError, UnsendableError
from sglang_psd.scheduler import vitals
from sglang_psd.scheduler.answers import DraftAnswer
from sglang_psd.scheduler.drafts import DraftClient
from sglang_psd.scheduler.vitals import Vitals

GREEDY = m.Sampling(greedy=True, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed=None)


class FakeChannel:
    """Keeps what is sent; hands out what the test puts in ``inbox`` (messages or exceptions)."""

    def __init__(self) -> None:
        self.sent: list[m.Message] = []
        self.inbox: deque = deque()
        self.full = False
        self.spin_s = 0.0

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
        self.vitals = Vitals(timeout_s)
        self.client = DraftClient(self.process, 3, 100, self.vitals, self.answers.append)  # type: ignore[arg-type]

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


def tokens_of(row: DraftRow | None) -> list[int] | None:
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
    bench.client.ping()
    bench.client.tend()
    assert len(bench.channel.sent) == sent


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
    bench.client.ping()
    found = m.Stats(0, 0, 10, 10, 0, 0)
    bench.channel.inbox.append(found)
    bench.client.poll()
    assert bench.client.stats == found
    assert isinstance(bench.channel.sent[-1], m.Ping)


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
    assert bench.client.drafting


# --- what a bad wire or a confused drafter may bring -----------------------------------------------


def test_a_row_the_drafter_does_not_hold_is_opened_again() -> None:
    """No drafts and no delay this time; afterwards the request counts as closed, so that it is handed over again."""
    bench = Bench(timeout_s=30.0)
    number = bench.begin("a", "b")
    bench.answer(number, "a", "b")
    lost = bench.channel.inbox.pop()
    bench.channel.inbox.append(msgspec.structs.replace(lost, counts=[0, 3], unknown=[0]))
    taken = bench.client.take([("a", 6, 9), ("b", 6, 9)])
    assert [tokens_of(row) for row in taken.rows] == [None, [1, 2, 3]] and taken.late == 0
    assert not bench.client.is_open("a") and bench.client.is_open("b") and bench.client.reopened == 1


def test_unknown_in_an_old_answer_says_nothing() -> None:
    bench = Bench()
    number = bench.begin("a")
    bench.client.commit([m.RoundRow("a", 7, [4])])
    bench.answer(number, "a")
    bench.channel.inbox.append(msgspec.structs.replace(bench.channel.inbox.pop(), unknown=[0]))
    bench.client.poll()
    assert bench.client.is_open("a")


def stats(bench: Bench, open_requests: int, fault: str | None = None) -> m.Stats:
    """The drafter's answer to the last ping."""
    ping = next(message for message in reversed(bench.channel.sent) if isinstance(message, m.Ping))
    return m.Stats(ping.ping_id, open_requests, 10, 10, 0, 0, fault)


def test_a_difference_in_what_is_open_is_mended(monkeypatch) -> None:
    bench = Bench()
    bench.begin("a", "b")
    monkeypatch.setattr(vitals, "PING_EVERY_S", 0.0)
    bench.client.tend()
    bench.channel.inbox.append(stats(bench, 2))
    bench.client.close(["b"])  # after the ping: the answer is from before it
    bench.client.tend()
    assert bench.client.open_requests == 1 and bench.client.resyncs == 0
    bench.channel.inbox.append(stats(bench, 2))
    bench.client.poll()
    assert bench.client.resyncs == 1 and bench.client.open_requests == 0
    assert bench.channel.sent[-1] == m.Reset() and bench.client.usable


def test_broken_accounting_is_the_end(monkeypatch) -> None:
    bench = Bench()
    monkeypatch.setattr(vitals, "PING_EVERY_S", 0.0)
    bench.client.tend()
    bench.channel.inbox.append(stats(bench, 0, "3 KV tokens are held and 6 are free, of 10"))
    bench.client.tend()
    assert bench.client.failure is not None and "3 KV tokens are held" in bench.client.failure


def test_a_death_while_idle_is_noticed() -> None:
    bench = Bench()
    bench.client.tend()
    assert bench.client.usable
    bench.process.running = False
    bench.client.tend()
    assert bench.client.failure == "its process has ended"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"tokens": np.array([1, 100, 3], m.TOKEN).tobytes()}, "token"),
        ({"tokens": np.array([1, -1, 3], m.TOKEN).tobytes()}, "token"),
        ({"law_ids": np.full(12, 100, m.TOKEN).tobytes()}, "token"),
        ({"law_probs": np.full(12, np.nan, m.PROB).tobytes()}, "distribution"),
        ({"law_probs": np.full(12, -0.1, m.PROB).tobytes()}, "distribution"),
        ({"law_probs": np.full(12, np.inf, m.PROB).tobytes()}, "distribution"),
        ({"num_steps": 4, "tokens": bytes(16), "law_ids": bytes(64), "law_probs": bytes(64)}, "at most"),
    ],
)
def test_drafts_that_cannot_be_verified_are_refused(change: dict, word: str, caplog) -> None:
    """The round goes on without them; the target never sees a token that it does not have."""
    bench = Bench(timeout_s=0.02)
    bench.answer(bench.begin("a"), "a", top_m=4)
    bench.channel.inbox.append(msgspec.structs.replace(bench.channel.inbox.pop(), **change))
    taken = bench.client.take([("a", 6, 9)])
    assert taken.rows == [None] and taken.late == 1 and bench.client.usable
    assert word in caplog.text


def test_tokens_that_the_draft_model_lacks_never_reach_it() -> None:
    bench = Bench()
    assert not bench.client.open("a", [1, 100, 2], GREEDY)
    assert not bench.channel.sent and not bench.client.is_open("a")
    bench.begin("b")
    bench.client.commit([m.RoundRow("b", 7, [100])])
    assert bench.channel.sent[-1] == m.Close(["b"]) and not bench.client.is_open("b")


@pytest.mark.parametrize(
    ("rid", "tokens", "sampling"),
    [
        ("a", [1, -1], GREEDY),
        ("a", [1, 2], msgspec.structs.replace(GREEDY, greedy=False, temperature=float("inf"))),
        ("a", [1, 2], msgspec.structs.replace(GREEDY, seed=2**70)),
    ],
)
def test_a_request_that_the_drafter_would_refuse_stays_here(rid: str, tokens: list[int], sampling: m.Sampling) -> None:
    """Handed over it would come back as unknown for ever; it is served without drafts."""
    bench = Bench()
    assert not bench.client.open(rid, tokens, sampling)
    assert not bench.channel.sent and not bench.client.is_open(rid) and bench.client.usable


def test_a_request_that_cannot_be_sent_need_not_be_tried_again(monkeypatch) -> None:
    """Where it was the channel that failed, the next drafter may take it."""
    bench = Bench()
    assert bench.client.open("a", [1, 2], GREEDY) and bench.client.is_open("a")

    def refuse(message: m.Message) -> None:
        raise UnsendableError("too long")

    monkeypatch.setattr(bench.channel, "send", refuse)
    assert not bench.client.open("b", [1, 2], GREEDY)
    assert not bench.client.is_open("b") and bench.client.usable
    monkeypatch.undo()
    bench.channel.full = True
    assert bench.client.open("c", [1, 2], GREEDY)
    assert not bench.client.is_open("c") and not bench.client.usable


def test_two_rows_of_one_name_are_drafted_for_neither() -> None:
    bench = Bench()
    bench.begin("a", "b")
    bench.client.commit([m.RoundRow("a", 7, [1]), m.RoundRow("b", 7, [1]), m.RoundRow("a", 9, [2])])
    closed, asked = bench.channel.sent[-2:]
    assert closed == m.Close(["a"]) and isinstance(asked, m.Round) and [row.rid for row in asked.rows] == ["b"]


@given(st.lists(st.tuples(st.sampled_from("oqcrtpxslk"), st.integers(0, 3), st.integers(4, 9)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_order_of_calls_and_answers_is_survived(steps: list[tuple[str, int, int]]) -> None:
    """Whatever arrives whenever: no call raises, and drafts continue the length they were asked for."""
    bench = Bench(timeout_s=0.0)
    client, names = bench.client, ["a", "b", "c", "d"]
    for kind, which, length in steps:
        rid = names[which]
        if kind == "o":
            client.open(rid, list(range(length)), GREEDY)
        elif kind == "q":
            client.commit([m.RoundRow(rid, length, [1])])
        elif kind == "c":
            client.close([rid])
        elif kind == "r":
            client.reset()
        elif kind == "t":
            row = client.take([(rid, length, 2)]).rows[0]
            assert row is None or (row.base_len == length and len(row.tokens) <= 2)
        elif kind == "p":
            client.tend()
        elif kind == "k":
            bench.channel.inbox.append(m.Failure("no", fatal=which == 0 and length == 9))
        else:
            bench.answer(which, rid, base_len=length, top_m=which)
            answer = bench.channel.inbox.pop()
            unknown = [0] if kind == "l" else []
            found = m.Stats(which, length - 4, 1, 1, 0, 0) if kind == "s" else answer
            bench.channel.inbox.append(msgspec.structs.replace(answer, unknown=unknown) if found is answer else found)
    assert client.open_requests <= 4


# --- new weights ---------------------------------------------------------------------------------


def test_new_weights_close_everything() -> None:
    bench = Bench()
    bench.begin("a", "b")
    bench.channel.inbox.append(m.Loaded())
    assert bench.client.load("/models/new", 5.0) is None
    assert bench.channel.sent[-1] == m.Load("/models/new")
    assert bench.client.open_requests == 0 and bench.client.usable


def test_weights_that_do_not_load_are_explained() -> None:
    bench = Bench()
    bench.channel.inbox.append(m.Loaded("no such file"))
    assert bench.client.load("/models/none", 5.0) == "no such file"
    assert bench.client.usable


def test_a_drafter_that_dies_or_says_nothing_over_new_weights_is_lost() -> None:
    for dies in (True, False):
        bench = Bench()
        bench.process.running = not dies
        assert bench.client.load("/models/new", 5.0 if dies else 0.05) == "the drafter was lost meanwhile."
        assert not bench.client.usable
