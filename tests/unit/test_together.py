"""How the rig compares alternatives."""

from __future__ import annotations

import pytest

from tests.rig.together import assert_same_alternatives

ROW = [(-0.5, 7), (-2.558056, 52), (-2.558059, 53)]


@pytest.mark.parametrize(
    "plain",
    [
        ROW,
        [(-0.5, 7), (-2.558055, 53), (-2.558063, 52)],  # a tie, the other way round
        [(-0.5, 7), (-2.558056, 52), (-2.558061, 99)],  # a tie with the first token that is not listed
    ],
)
def test_ties_are_the_same(plain: list[tuple[float, int]]) -> None:
    assert_same_alternatives(ROW, plain)


@pytest.mark.parametrize(
    "plain",
    [
        [(-0.5, 8), (-2.558056, 52), (-2.558059, 53)],
        [(-0.5, 52), (-2.558056, 7), (-2.558059, 53)],
    ],
)
def test_other_tokens_are_not(plain: list[tuple[float, int]]) -> None:
    with pytest.raises(AssertionError):
        assert_same_alternatives(ROW, plain)
