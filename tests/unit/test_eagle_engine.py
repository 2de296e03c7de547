"""What an EAGLE engine does with hidden states that it cannot feed, over a model that has no room."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_psd.channel.mailbox import Mailbox, MailboxWriter
from sglang_psd.channel.messages import Credit, FeatureRow, Features, Sampling
from sglang_psd.drafter.eagle import EagleEngine
from sglang_psd.drafter.head_cache import EndedRequests
from sglang_psd.drafter.head_rows import HeadState
from sglang_psd.errors import ProtocolError

GREEDY = Sampling(True, 1.0, 1, 1.0, 0.0, None)
ROWS = 8


class FullModel:
    """Every KV slot is taken."""

    device = "cpu"
    context_len = 1000

    def reserve_all(self, states: list[HeadState], lengths: list[int]) -> list[bool]:
        return [False] * len(states)

    def release(self, state: HeadState) -> None:
        state.forget_kv()


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    engine: Any = object.__new__(EagleEngine)
    engine.spec = SimpleNamespace(num_steps=3)
    engine._model = FullModel()
    engine._mailbox = Mailbox(ROWS, 1, torch.float32, "cpu", str(tmp_path))
    engine._writer = MailboxWriter(engine._mailbox.handle(), None)
    engine._ended = EndedRequests(engine._model.release)
    engine._states, engine._holds_spare = {}, False
    return engine


def send(engine: Any, *rows: FeatureRow) -> Credit:
    """Each row of the mailbox says which position it belongs to."""
    positions = [row.first + i for row in rows for i in range(row.count)]
    engine._writer.write(0, torch.tensor(positions, dtype=torch.float32).view(-1, 1))
    return engine.take_features(Features(0, len(positions), list(rows)))


def test_rows_that_cannot_be_fed_do_not_pile_up(engine: Any) -> None:
    """Whoever finds as many waiting as the mailbox holds begins anew; each keeps the newest rows."""
    for name in "ab":
        engine._states[name] = HeadState(name, GREEDY, list(range(200)))
    for first in range(0, 120, 4):
        credit = send(engine, FeatureRow("a", first, 4), FeatureRow("b", first, 4), FeatureRow("gone", 0, 0))
        assert credit == Credit(8)
        waiting = {name: [int(x) for piece in s.waiting for x in piece[:, 0]] for name, s in engine._states.items()}
        for name, state in engine._states.items():
            assert waiting[name] == list(range(state.start, first + 4)), "what waits belongs to other positions"
            assert state.num_waiting == len(waiting[name])
        assert sum(map(len, waiting.values())) <= 2 * ROWS


def test_rows_beyond_the_mailbox_are_refused(engine: Any) -> None:
    with pytest.raises(ProtocolError, match="no room"):
        engine.take_features(Features(4, 12, [FeatureRow("a", 0, 5)]))


class RoomyModel(FullModel):
    """Has a slot for everybody, and computes nothing."""

    def __init__(self) -> None:
        self.copied: list[tuple[str, str, int]] = []

    def reserve_all(self, states: list[HeadState], lengths: list[int]) -> list[bool]:
        for state, length in zip(states, lengths):
            state.pool_row, state.num_slots = 1, max(state.num_slots, length)
        return [True] * len(states)

    def feed(self, states: list[HeadState], takes: list[int], features: torch.Tensor) -> None:
        assert len(features) == sum(takes)

    def copy_kv(self, source: HeadState, state: HeadState, count: int) -> None:
        self.copied.append((source.rid, state.rid, count))


@pytest.mark.parametrize(("hit", "inherited"), [(5, 5), (6, 5)])
def test_a_request_that_is_being_read_passes_on_what_it_has(engine: Any, hit: int, inherited: int) -> None:
    """Its last hidden state waits for its chain: who begins alike right behind it leaves that position out."""
    engine._model = RoomyModel()
    tokens = list(range(20))
    engine._states = {rid: HeadState(rid, GREEDY, list(tokens)) for rid in "ab"}
    send(engine, FeatureRow("a", 0, 6))
    while engine.prefill_some():
        pass
    assert (engine._states["a"].known, engine._states["a"].fed) == (6, 5)
    send(engine, FeatureRow("b", hit, 2))
    state = engine._states["b"]
    assert engine._model.copied == [("a", "b", inherited)]
    assert (state.start, state.fed, state.known) == (hit - inherited, inherited, inherited + 2)
