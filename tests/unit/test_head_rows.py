"""Which hidden state is fed with which token."""

from __future__ import annotations

import torch

from sglang_psd.channel.messages import Sampling
from sglang_psd.drafter.head_rows import HeadState

GREEDY = Sampling(True, 1.0, 1, 1.0, 0.0, None)


def rows(*positions: int) -> torch.Tensor:
    """Hidden states that say which position they belong to."""
    return torch.tensor(positions, dtype=torch.float32).view(-1, 1)


def state(tokens: int) -> HeadState:
    return HeadState("a", GREEDY, list(range(tokens)))


def positions(pieces: list[torch.Tensor]) -> list[int]:
    return [int(value) for piece in pieces for value in piece[:, 0]]


def test_the_last_prompt_token_waits_for_its_successor() -> None:
    s = state(4)
    s.receive(0, rows(0, 1, 2, 3))
    assert s.feedable == 3 and not s.complete
    assert s.commit([9], 5)
    assert s.feedable == 4 and s.complete
    assert positions(s.take(2)) == [0, 1] and positions(s.take(2)) == [2, 3]
    assert s.fed == 4 and s.feedable == 0 and not s.complete


def test_a_round_adds_one_row_per_token() -> None:
    s = state(4)
    s.receive(0, rows(0, 1, 2, 3))
    s.commit([9], 5)
    s.take(4)
    assert s.receive(4, rows(4, 5, 6))
    assert not s.complete, "hidden states without their tokens"
    assert s.commit([7, 7, 7], 8)
    assert s.complete and positions(s.take(3)) == [4, 5, 6]


def test_hidden_states_of_tokens_that_were_cut_off_are_dropped() -> None:
    s = state(4)
    s.receive(0, rows(0, 1))
    s.receive(2, rows(2, 3))
    s.commit([9], 5)
    s.take(4)
    s.receive(4, rows(4, 5, 6))
    assert s.commit([7], 6)
    assert s.complete and positions(s.take(1)) == [4]
    assert s.receive(5, rows(50)), "the next ones continue"
    s.commit([8], 7)
    assert positions(s.take(s.feedable)) == [50]


def test_a_gap_begins_the_context_anew() -> None:
    s = state(10)
    s.receive(0, rows(0, 1, 2))
    s.take(3)
    assert not s.receive(9, rows(9))
    assert (s.start, s.known, s.fed) == (9, 1, 0)
    s.commit([1], 11)
    assert s.complete and positions(s.take(1)) == [9]


def test_positions_that_were_fed_already_begin_it_anew() -> None:
    s = state(6)
    s.receive(0, rows(0, 1, 2, 3))
    s.take(4)
    assert not s.receive(2, rows(2, 3))
    assert (s.start, s.known, s.fed) == (2, 2, 0)


def test_lost_kv_leaves_what_waits() -> None:
    s = state(8)
    s.receive(0, rows(0, 1, 2, 3, 4))
    s.take(2)
    s.forget_kv()
    assert (s.start, s.known, s.fed) == (2, 3, 0)
    assert positions(s.take(3)) == [2, 3, 4]


def test_a_lost_message_is_noticed() -> None:
    s = state(4)
    assert not s.commit([1, 2], 5) and len(s.tokens) == 4
