"""The drafter's engine against random messages: drafts are a function of committed tokens, whatever was done before.

The model is a stand-in whose KV says what it was computed from: a slot holds a hash of all that its token saw. So a
slot that holds something else than it should, or that was written under another request's feet, changes drafts.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_psd.channel.checks import check_contents, check_proposals
from sglang_psd.channel.messages import TOKEN, Close, Open, Ping, Round, RoundRow, Sampling
from sglang_psd.drafter import engine as module
from sglang_psd.drafter.answer import Laws, make_proposals
from sglang_psd.drafter.chain import HostChain
from sglang_psd.drafter.engine import DraftEngine
from sglang_psd.drafter.model import DraftModel
from sglang_psd.drafter.serve import DrafterLoop

VOCAB = 7
STEPS = 3
CONTEXT = 90
LAWS = (
    Sampling(greedy=True, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed=None),
    # Only the most likely token is left: the draft is certain, and it comes with a law.
    Sampling(greedy=False, temperature=1e-3, top_k=1, top_p=1.0, min_p=0.0, seed=None),
    Sampling(greedy=False, temperature=1e-3, top_k=1, top_p=1.0, min_p=0.0, seed=5),
)


def seen(before: int, token: int) -> int:
    """What a token's KV holds, behind one that holds ``before``."""
    return (before * 1_000_003 + token + 1) % (1 << 61)


def next_token(state: int) -> int:
    return state // 11 % VOCAB


def drafts_after(tokens: list[int], count: int) -> list[int]:
    """The drafts that continue ``tokens``: the model's, computed from nothing."""
    state, drafts = 0, []
    for token in tokens:
        state = seen(state, token)
    for _ in range(count):
        drafts.append(next_token(state))
        state = seen(state, drafts[-1])
    return drafts


class Slots:
    """An allocator that hands out what came back last, so that slots change hands as fast as can be."""

    def __init__(self, size: int):
        self.free_slots = list(range(size, 0, -1))

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, count: int) -> torch.Tensor:
        return torch.tensor([self.free_slots.pop() for _ in range(count)])

    def free(self, slots: torch.Tensor) -> None:
        assert not set(slots.tolist()) & set(self.free_slots)
        self.free_slots.extend(slots.tolist())


class HashModel(DraftModel):
    """``DraftModel`` with its own pools and chains, and a forward of hashes."""

    def __init__(self, spec, kv_tokens: int):
        self._spec, self.device = spec, "cpu"
        self._num_rows, self._free_rows = spec.max_requests, list(range(spec.max_requests, 0, -1))
        self._table = SimpleNamespace(req_to_token=torch.zeros(spec.max_requests + 1, CONTEXT + 9, dtype=torch.int32))
        self._allocator = Slots(kv_tokens)
        self._graphs, self._eager = None, None
        self._generator = torch.Generator().manual_seed(1)
        self._kv = [0] * (kv_tokens + 1)
        self.context_len, self.vocab_size = CONTEXT, VOCAB
        self.kv_tokens = self.free_kv_tokens

    def load_weights(self, path: str) -> None:
        self._kv = [13] * len(self._kv)

    def _forward(self, mode, rows, lens_cpu, lens, ids, *, positions, owners, **extend) -> torch.Tensor:
        table = self._table.req_to_token
        logits = torch.zeros(len(ids), VOCAB)
        for i, (row, at, token) in enumerate(zip(owners.tolist(), positions.tolist(), ids.tolist())):
            before = self._kv[int(table[row, at - 1])] if at else 0
            self._kv[int(table[row, at])] = state = seen(before, token)
            logits[i, next_token(state)] = 1.0
        return logits


class Wire:
    """The scheduler's end: what the loop has not read yet, and what it has answered."""

    def __init__(self) -> None:
        self.waiting: list = []
        self.sent: list = []
        self.arrive = lambda: None

    def receive(self, timeout_s: float):
        self.arrive()
        return self.waiting.pop(0) if self.waiting else None

    def send_patiently(self, message, *_args) -> bool:
        self.sent.append(message)
        return True


class Play:
    """A scheduler that does anything, in bursts, and remembers what each request's drafts have to be."""

    def __init__(self, seed: int, *, kv_tokens: int, integrity_checks: bool, shares_device: bool):
        self.dice = random.Random(seed)
        spec = SimpleNamespace(
            max_requests=5,
            num_steps=STEPS,
            top_m=4,
            vocab_limit=VOCAB,
            integrity_checks=integrity_checks,
            shares_device=shares_device,
        )
        self.engine = object.__new__(DraftEngine)
        self.engine._load = lambda spec: HashModel(spec, kv_tokens)  # type: ignore[method-assign]
        self.engine.__init__(spec)  # type: ignore[misc]
        self.wire = Wire()
        self.loop = DrafterLoop(self.engine, self.wire, 0)  # type: ignore[arg-type]
        self.loop._has_parent = lambda: bool(self.wire.waiting or self.loop._inbox)  # type: ignore[method-assign]
        self.wire.arrive = self._more
        self.tokens: dict[str, list[int]] = {}
        self.history: dict[tuple[int, str], list[int]] = {}
        self.rounds = self.names = self.checked = self.full = 0
        self.left = 0
        self.haste = self.dice.choice([0.0, 0.05, 0.3])

    def _more(self) -> None:
        """Messages arrive while others are served."""
        if self.left and self.dice.random() < self.haste:
            self.burst()

    def burst(self) -> None:
        for _ in range(self.dice.choice([1, 2, 3]) if self.dice.random() < self.haste + 0.1 else 1):
            self.left -= 1
            self._message()

    def _message(self) -> None:
        dice = self.dice
        what = dice.choices(["round", "open", "close", "swap", "again", "lost", "ping"], [24, 3, 1, 2, 1, 0.3, 0.5])[0]
        rids = list(self.tokens)
        if what == "open" or not rids:
            if len(rids) >= 6:
                return
            self._open(f"r{self.names}", [dice.randrange(VOCAB) for _ in range(dice.choice([1, 2, 5, 20]))])
            self.names += 1
        elif what == "round":
            self._round(dice.sample(rids, dice.randint(1, len(rids))))
        elif what == "close":
            self._close(dice.choice(rids))
        elif what == "swap":  # one leaves, and its room is taken at once
            rid = dice.choice(rids)
            self._close(rid)
            again = rid if dice.random() < 0.5 else f"r{self.names}"
            self.names += 1
            self._open(again, [dice.randrange(VOCAB) for _ in range(dice.choice([2, 12]))])
        elif what == "again":
            if rounds := [m for m in self.wire.waiting if isinstance(m, Round)]:
                self.wire.waiting.append(rounds[-1])
        elif what == "lost":
            self.tokens[dice.choice(rids)].append(dice.randrange(VOCAB))
        else:
            self.wire.waiting.append(Ping(0))

    def _open(self, rid: str, tokens: list[int]) -> None:
        self.tokens[rid] = tokens
        self.wire.waiting.append(Open(rid, np.array(tokens, TOKEN).tobytes(), self.dice.choice(LAWS)))

    def _close(self, rid: str) -> None:
        del self.tokens[rid]
        self.wire.waiting.append(Close([rid]))

    def _round(self, rids: list[str]) -> None:
        rows = []
        for rid in rids:
            tokens = self.tokens[rid]
            if len(tokens) > CONTEXT:
                continue
            accepted = self.dice.choice([0, 1, STEPS, STEPS])
            kept = drafts_after(tokens, accepted)
            if kept and self.dice.random() < 0.2:  # tokens that the drafter did not propose
                kept[self.dice.randrange(len(kept))] = self.dice.randrange(VOCAB)
            gained = [*kept, self.dice.randrange(VOCAB)]
            tokens += gained
            rows.append(RoundRow(rid, len(tokens), gained))
            self.history[self.rounds, rid] = list(tokens)
        self.wire.waiting.append(Round(self.rounds, rows, self.dice.choice([STEPS, STEPS, STEPS, 2, 1])))
        self.rounds += 1

    def check(self) -> None:
        for message in self.wire.sent:
            if not hasattr(message, "rids"):
                assert message.fault is None
                continue
            drafts = np.frombuffer(message.tokens, TOKEN).reshape(-1, message.num_steps).tolist()
            unknown = {message.rids[i] for i in message.unknown}
            for rid, count, row in zip(message.rids, message.counts, drafts):
                expected = self.history[message.round_id, rid]
                assert row[:count] == drafts_after(expected, count), (message.round_id, rid)
                self.checked += count
                self.full += count == STEPS
            for rid in unknown & set(self.tokens):  # as the scheduler does
                self._open(rid, self.tokens[rid])
        self.wire.sent.clear()

    def run(self, messages: int) -> None:
        self.left = messages
        while self.left > 0:
            self.burst()
            self.loop.run()
            self.check()
            assert self.engine.fault() is None
            for state in self.engine._states.values():
                self._kv_is_sound(state)

    def _kv_is_sound(self, state) -> None:
        """What a request believes to have fed stands in its slots."""
        model, before = self.engine._model, 0
        for at, token in enumerate(state.fed):
            before = seen(before, token)
            assert model._kv[int(model._table.req_to_token[state.pool_row, at])] == before, (state.rid, at)


@pytest.mark.parametrize("shares_device", [False, True])
@pytest.mark.parametrize("kv_tokens", [140, 500])
def test_drafts_depend_on_committed_tokens_only(
    monkeypatch: pytest.MonkeyPatch, kv_tokens: int, shares_device: bool
) -> None:
    monkeypatch.setattr(module, "PREFILL_CHUNK", 8)
    known, drafts = [], 0
    short_way = DraftEngine.draft_known

    def draft_known(self, message: Round, received_s: float):
        answer = short_way(self, message, received_s)
        known.append(answer is not None)
        return answer

    monkeypatch.setattr(DraftEngine, "draft_known", draft_known)
    for seed in range(12):
        play = Play(seed, kv_tokens=kv_tokens, integrity_checks=seed % 2 == 0, shares_device=shares_device)
        play.run(100)
        drafts += play.checked
    # Both ways were taken.
    assert drafts > 1000 and 50 < sum(known) < len(known) - 50


def test_on_the_targets_device_the_pause_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs in it, slots are taken once in many rounds, and a chain accepted as a whole goes on all the same."""
    fed, taken = [], []
    forward, reserve_all = HashModel._forward, HashModel.reserve_all

    def count_forward(self, *args, **kwargs):
        fed.append(in_pause)
        return forward(self, *args, **kwargs)

    def count_slots(self, states, lengths):
        if any(state.num_slots < length for state, length in zip(states, lengths)):
            taken.append(len(states))
        return reserve_all(self, states, lengths)

    monkeypatch.setattr(HashModel, "_forward", count_forward)
    monkeypatch.setattr(HashModel, "reserve_all", count_slots)
    in_pause = False
    engine = Play(0, kv_tokens=500, integrity_checks=True, shares_device=True).engine
    tokens = [1, 2, 3]
    engine.open(Open("a", np.array(tokens, TOKEN).tobytes(), LAWS[0]))
    engine.prefill_some()
    taken.clear()
    gained = [next_token(5)]
    for i in range(15):
        tokens += gained
        rows = [RoundRow("a", len(tokens), gained)]
        answer = engine.draft_known(Round(i, rows, STEPS), 0.0)
        assert (answer is not None) == (i > 0), "only the first round has to find its slots"
        answer = answer or engine.draft(i, rows, STEPS, 0.0)
        drafts = np.frombuffer(answer.tokens, TOKEN).tolist()
        assert drafts == drafts_after(tokens, STEPS)
        gained = [*drafts, (drafts[-1] + 1) % VOCAB]
        in_pause = True
        engine.use_pause()
        in_pause = False
    assert len(fed) > 15 and not any(fed)
    assert taken == [1]


@pytest.mark.parametrize(("kv_tokens", "short"), [(500, 14), (40, 0)])
def test_a_drafter_that_never_rests_takes_slots_for_many_rounds(kv_tokens: int, short: int) -> None:
    """All rounds but the first find theirs, unless the pool is too small to take any that nobody needs yet."""
    engine = Play(0, kv_tokens=kv_tokens, integrity_checks=True, shares_device=False).engine
    tokens, gained, found = [1, 2, 3], [next_token(5)], []
    engine.open(Open("a", np.array(tokens, TOKEN).tobytes(), LAWS[0]))
    engine.prefill_some()
    for i in range(15):
        tokens += gained
        rows = [RoundRow("a", len(tokens), gained)]
        answer = engine.draft_known(Round(i, rows, STEPS), 0.0)
        found.append(answer is not None)
        drafts = np.frombuffer((answer or engine.draft(i, rows, STEPS, 0.0)).tokens, TOKEN).tolist()
        assert drafts == drafts_after(tokens, STEPS)
        gained = drafts[:1]
    assert sum(found) == short


@pytest.mark.parametrize("shares_device", [False, True])
def test_slots_taken_ahead_give_way(shares_device: bool) -> None:
    """A long prompt is read although an earlier request held slots for many rounds; both get all their drafts."""
    engine = Play(0, kv_tokens=110, integrity_checks=True, shares_device=shares_device).engine
    tokens = {"a": [1, 2, 3], "b": [i % VOCAB for i in range(70)]}

    def draft(round_id: int) -> None:
        rows = [RoundRow(rid, len(all_of), all_of[-1:]) for rid, all_of in tokens.items() if rid in engine._states]
        answer = engine.draft(round_id, rows, STEPS, 0.0)
        engine.use_pause()
        assert list(answer.counts) == [STEPS] * len(rows)
        drafts = np.frombuffer(answer.tokens, TOKEN).reshape(len(rows), STEPS).tolist()
        assert drafts == [drafts_after(tokens[row.rid], STEPS) for row in rows]
        for row, chain in zip(rows, drafts):
            tokens[row.rid] += chain[:1]

    engine.open(Open("a", np.array(tokens["a"], TOKEN).tobytes(), LAWS[0]))
    tokens["a"] += [next_token(5)]
    draft(0)
    assert engine._states["a"].num_slots > 40
    engine.open(Open("b", np.array(tokens["b"], TOKEN).tobytes(), LAWS[0]))
    tokens["b"] += [next_token(5)]
    for i in range(1, 9):
        draft(i)


def test_a_long_prompt_keeps_no_round_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own rounds go without drafts until it is read, one part a round, or faster where there is time."""
    monkeypatch.setattr(module, "PREFILL_CHUNK", 8)
    engine = Play(0, kv_tokens=500, integrity_checks=True, shares_device=False).engine
    tokens = [i % VOCAB for i in range(40)]
    engine.open(Open("a", np.array(tokens, TOKEN).tobytes(), LAWS[0]))
    counts = []
    for i in range(6):
        tokens.append(i % VOCAB)
        fed = len(engine._states["a"].fed)
        answer = engine.draft(i, [RoundRow("a", len(tokens), tokens[-1:])], STEPS, 0.0)
        counts += answer.counts
        assert len(engine._states["a"].fed) - fed <= 8 + STEPS
        if i == 2:
            engine.prefill_some()
    assert counts == [0, 0, 0, 0, STEPS, STEPS]
    assert np.frombuffer(answer.tokens, TOKEN).tolist() == drafts_after(tokens, STEPS)


def test_a_law_that_is_none_takes_its_own_drafts_only() -> None:
    """NaN, out of a draft model in a dtype too narrow for it."""
    probs = np.full((2, STEPS, 4), 0.25, np.float32)
    probs[0, 1, 2] = np.nan
    chain = HostChain(np.ones((3, STEPS), np.int64), np.ones((2, STEPS, 4), np.int64), probs)
    rows = [RoundRow(rid, 5, [1]) for rid in "abc"]
    answer = make_proposals(7, rows, [STEPS] * 3, chain.tokens, Laws(chain, [0, 2], [0, 1]), (0.0, 0.0))
    check_proposals(answer)
    check_contents(answer, STEPS, VOCAB)
    assert answer.counts == [0, STEPS, STEPS] and answer.sampled == [2] and answer.top_m == 4
    none = make_proposals(7, rows[:1], [STEPS], chain.tokens[:1], Laws(chain, [0], [0]), (0.0, 0.0))
    check_proposals(none)
    assert none.counts == [0] and none.sampled == [] and none.top_m == 0 and not none.law_probs
