"""The k-step loop over a toy model whose logits depend on every token in the row's KV."""

import pytest
import torch

from sglang_psd.channel.messages import Sampling
from sglang_psd.drafter.chain import CATCH_UP, Chain, run_step
from sglang_psd.drafter.columns import Columns, Kinds
from sglang_psd.drafter.rows import DraftState

GREEDY = Sampling(True, 1.0, 1, 1.0, 0.0, None)
VOCABULARY, STEPS = 50, 3


class ToyModel:
    """KV by row and position; the next token is a sum over what stands there."""

    def __init__(self) -> None:
        self.kv: dict[tuple[int, int], int] = {}

    def decode(self, rows: torch.Tensor, lens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        batch = list(zip(rows.tolist(), lens.tolist(), ids.tolist()))
        self.kv.update({(row, length - 1): token for row, length, token in batch})
        logits = torch.zeros(len(batch), VOCABULARY)
        for i, (row, length, _) in enumerate(batch):
            logits[i, self.next([self.kv.get((row, at), -1) for at in range(length)])] = 1
        return logits

    @staticmethod
    def next(tokens: list[int]) -> int:
        return sum((i + 1) * token for i, token in enumerate(tokens)) % VOCABULARY

    def continued(self, tokens: list[int], count: int) -> list[int]:
        tokens = list(tokens)
        for _ in range(count):
            tokens.append(self.next(tokens))
        return tokens[-count:]


def draft(model: ToyModel, states: list[DraftState], width: int, *, feed_last: bool) -> list[list[int]]:
    columns, chain = Columns.empty(len(states), "cpu"), Chain.empty(STEPS, len(states), 4, "cpu")
    kinds = columns.fill(states)
    assert kinds == Kinds()
    for step in range(STEPS + feed_last):
        run_step(model.decode, columns, chain, kinds, None, step, width if step == 0 else 1, VOCABULARY)
    tokens = chain.to_host(kinds, len(states)).tokens.tolist()
    for state, drafts in zip(states, tokens):
        state.note_chain(drafts)
        if feed_last:
            state.note_last(drafts[-1])
    return tokens


def prefilled(model: ToyModel, rid: str, row: int, tokens: list[int]) -> DraftState:
    """All but the last token have KV."""
    model.kv.update({(row, at): token for at, token in enumerate(tokens[:-1])})
    return DraftState(rid, GREEDY, tokens, tokens[:-1], pool_row=row)


@pytest.mark.parametrize("feed_last", [False, True])
def test_drafts_are_the_models_own_continuation_whatever_was_accepted(feed_last: bool) -> None:
    model = ToyModel()
    states = [prefilled(model, "a", 1, [3, 1, 4]), prefilled(model, "b", 2, [2, 7, 1, 8, 2])]
    width = 1
    for accepted in ((3, 3), (0, 2), (3, 1), (1, 3)):
        drafts = draft(model, states, width, feed_last=feed_last)
        assert drafts == [model.continued(state.tokens, STEPS) for state in states]
        for state, tokens, count in zip(states, drafts, accepted):
            new = [*tokens[:count], (tokens[0] + 1) % VOCABULARY]
            assert state.commit(new, len(state.tokens) + len(new))
        missing = [state.missing for state in states]
        assert missing == [1 if feed_last or count < STEPS else 2 for count in accepted]
        width = max(missing)
    assert width in (1, CATCH_UP)


def test_catching_up_where_nothing_is_missing_changes_nothing() -> None:
    narrow, wide = ToyModel(), ToyModel()
    tokens = [3, 1, 4, 1, 5]
    assert draft(narrow, [prefilled(narrow, "a", 1, tokens)], 1, feed_last=False) == draft(
        wide, [prefilled(wide, "a", 1, list(tokens))], CATCH_UP, feed_last=False
    )
    assert narrow.kv.items() <= wide.kv.items()
