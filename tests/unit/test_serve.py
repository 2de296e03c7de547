"""The drafter's main loop, with an engine that only remembers what it was told."""

from __future__ import annotations

import os
from collections import deque

from sglang_psd.channel import messages as m
from sglang_psd.drafter import serve
from sglang_psd.drafter.serve import DrafterLoop
from sglang_psd.errors import ProtocolError

GREEDY = m.Sampling(True, 1.0, 1, 1.0, 0.0, None)


class FakeEngine:
    """Remembers calls; ``cold`` requests have a prompt that is still to be read, ``known`` ones go on."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.calls: list[tuple] = []
        self.cold: set[str] = set()
        self.pauses: list[tuple] = []

    def open(self, message: m.Open) -> None:
        if message.rid == "foreign":
            raise ProtocolError("a token that the draft model does not have")
        self.calls.append(("open", message.rid))

    def reset(self) -> None:
        self.calls.append(("reset",))

    def close(self, message: m.Close) -> None:
        self.calls.append(("close", *message.rids))

    def commit(self, row: m.RoundRow) -> None:
        self.calls.append(("commit", row.rid, row.base_len))

    def backlog(self, rid: str) -> int:
        return 1 if rid in self.cold else 0

    def prefill_some(self) -> bool:
        return False

    def draft_known(self, message: m.Round, received_s: float):
        if all(row.rid in self.known for row in message.rows):
            return self.draft(message.round_id, message.rows, message.num_steps, received_s)
        return None

    def draft(self, round_id, rows, num_steps, received_s):
        self.calls.append(("draft", round_id, *(row.rid for row in rows)))
        return ("proposals", round_id, [row.rid for row in rows])

    def use_pause(self) -> None:
        self.pauses.append(self.calls[-1] if self.calls else ())

    def load(self, message: m.Load):
        self.calls.append(("load", message.path))
        return m.Loaded()

    def stats(self, ping_id: int):
        return ("stats", ping_id)


class FakeChannel:
    """Delivers ``batches`` of messages, one batch per blocking receive, then ``Shutdown``."""

    def __init__(self, *batches: list) -> None:
        self.batches = deque(batches)
        self.ready: deque = deque()
        self.sent: list = []

    def receive(self, timeout_s: float):
        if not self.ready and timeout_s > 0:
            self.ready.extend(self.batches.popleft() if self.batches else [m.Shutdown()])
        item = self.ready.popleft() if self.ready else None
        if isinstance(item, Exception):
            raise item
        return item

    def send_patiently(self, message, slice_s: float, worth_waiting) -> bool:
        self.sent.append(message)
        return True


def run(engine: FakeEngine, *batches: list) -> FakeChannel:
    channel = FakeChannel(*batches)
    DrafterLoop(engine, channel, os.getppid()).run()  # type: ignore[arg-type]
    return channel


def round_of(round_id: int, *rows: tuple[str, int]) -> m.Round:
    return m.Round(round_id, [m.RoundRow(rid, length, [1]) for rid, length in rows], 3)


def test_rounds_are_answered_in_order() -> None:
    engine = FakeEngine()
    channel = run(engine, [m.Open("a", b"", GREEDY), round_of(0, ("a", 5))], [round_of(1, ("a", 6)), m.Close(["a"])])
    assert engine.calls == [("open", "a"), ("draft", 0, "a"), ("draft", 1, "a"), ("close", "a")]
    assert [message[1] for message in channel.sent] == [0, 1]


def test_a_pause_is_used_once_nothing_waits() -> None:
    engine = FakeEngine()
    run(engine, [round_of(0, ("a", 5)), round_of(1, ("b", 5))], [m.Ping(1)], [round_of(2, ("a", 6))])
    assert engine.pauses == [("draft", 1, "b"), ("draft", 2, "a")]


def test_overtaken_rows_are_committed_but_not_drafted() -> None:
    """After a pause the drafter drafts the newest round of each request only, and loses no token."""
    engine = FakeEngine()
    backlog = [round_of(i, ("a", 5 + i), ("b", 9 + i)) for i in range(200)] + [round_of(200, ("a", 205))]
    channel = run(engine, backlog)
    assert [call[2] for call in engine.calls if call[:2] == ("commit", "a")] == list(range(5, 205))
    assert [call[2] for call in engine.calls if call[:2] == ("commit", "b")] == list(range(9, 208))
    assert [message[1:] for message in channel.sent] == [(199, ["b"]), (200, ["a"])]


def test_cold_rows_do_not_hold_up_warm_ones() -> None:
    engine = FakeEngine()
    engine.cold = {"b"}
    channel = run(engine, [round_of(0, ("b", 5), ("a", 5))])
    assert [message[2] for message in channel.sent] == [["a"], ["b"]]


def test_a_malformed_message_is_reported_and_survived() -> None:
    engine = FakeEngine()
    channel = run(engine, [ProtocolError("torn"), m.Ping(7)])
    assert isinstance(channel.sent[0], m.Failure) and not channel.sent[0].fatal
    assert channel.sent[1] == ("stats", 7)


def test_the_loop_ends_when_the_parent_is_another() -> None:
    channel = FakeChannel([m.Ping(1)])
    DrafterLoop(FakeEngine(), channel, parent_pid=-1).run()  # type: ignore[arg-type]
    assert channel.sent == []


def test_a_request_that_cannot_be_opened_is_reported_and_survived() -> None:
    engine = FakeEngine()
    channel = run(engine, [m.Open("foreign", bytes(4), GREEDY), m.Open("a", bytes(4), GREEDY), m.Reset()])
    assert engine.calls == [("open", "a"), ("reset",)]
    assert [message.fatal for message in channel.sent] == [False]


def test_the_inbox_is_bounded(monkeypatch) -> None:
    """What is not read stays in the queue, where the sender notices."""
    monkeypatch.setattr(serve, "INBOX_MESSAGES", 8)
    engine, waiting = FakeEngine(), []
    channel = FakeChannel([round_of(i, ("a", 5 + i)) for i in range(40)])
    engine.draft = lambda *args: waiting.append(len(loop._inbox))  # type: ignore[method-assign]
    engine.commit = lambda row: waiting.append(len(loop._inbox))  # type: ignore[method-assign]
    loop = DrafterLoop(engine, channel, os.getppid())  # type: ignore[arg-type]
    loop.run()
    assert len(waiting) == 40 and max(waiting) <= 8


def test_new_weights_are_answered() -> None:
    engine = FakeEngine()
    channel = run(engine, [m.Load("/models/new")])
    assert engine.calls == [("load", "/models/new")] and channel.sent == [m.Loaded()]
