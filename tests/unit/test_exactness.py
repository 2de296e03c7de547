"""What the comparison of engines side by side forgives and what not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scripts.exactness.compare import Verdict, compare, gap_of, same_law
from scripts.exactness.traffic import Request

GREEDY = Request(7, "greedy", [1, 2, 3], {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 4})
SEEDED = Request(8, "seeded", [1, 2, 3], {"temperature": 1.0, "sampling_seed": 5, "max_new_tokens": 4})
RIGHT: dict[str, Any] = {
    "ids": [10, 11, 12, 13],
    "text": "abcd",
    "finish": {"type": "length", "length": 4},
    "usage": 4,
    "reasoning": 0,
    "rounds": 2,
    "logprobs": [-0.1, -0.2, -0.7, -0.4],
    "tops": [[[-0.1, 10], [-2.0, 20]], [[-0.2, 11], [-3.0, 21]], [[-0.7, 12], [-0.7001, 22]], [[-0.4, 13], [-2.0, 23]]],
}


def judged(request: Request, **changed: Any) -> Verdict:
    verdict = Verdict()
    compare(request, [{**RIGHT, **changed}], [RIGHT], 1e-3, verdict)
    return verdict


def test_equal_answers_are_equal() -> None:
    verdict = judged(GREEDY)
    assert verdict.figures()["identical"] == 1 and not verdict.news(1e-3)


def test_a_tie_may_go_either_way_and_is_told() -> None:
    verdict = judged(GREEDY, ids=[10, 11, 22, 99], text="abxy")
    assert [round(found.gap, 4) for found in verdict.differences] == [0.0001] and not verdict.wide
    assert "differs at token 2" in verdict.news(1e-3)[0] and not verdict.news(1e-3)


@pytest.mark.parametrize("ids", [[20, 11, 12, 13], [10, 99, 12, 13]])
def test_another_token_is_wrong_listed_or_not(ids: list[int]) -> None:
    verdict = judged(GREEDY, ids=ids)
    assert len(verdict.wide) == 1 and verdict.wide[0].gap > 1.8


@pytest.mark.parametrize(
    "changed",
    [
        {"finish": {"type": "stop", "matched": 13}},
        {"text": "abc"},
        {"usage": 5},
        {"reasoning": 2},
        {"ids": [10, 11, 12], "usage": 3},
        {"logprobs": [-0.1, -0.21, -0.7, -0.4]},
        {"error": "ValueError: no"},
        {"broken_stream": True},
        {"finish": {"type": "abort"}},
    ],
)
def test_no_tie_explains_this(changed: dict[str, Any]) -> None:
    assert len(judged(GREEDY, **changed).failures) == 1


def test_an_aborted_answer_is_a_beginning() -> None:
    aborted = Request(9, "greedy", [1], GREEDY.sampling, {}, abort_ms=5)
    cut = {"ids": [10, 11], "usage": 2, "text": "ab", "finish": {"type": "abort"}}
    assert not judged(aborted, **cut).failures
    assert judged(aborted, **{**cut, "ids": [10, 20]}).wide


def test_noise_counts_for_seeded_requests() -> None:
    """The gap is that of the perturbed law: what the noise decides is no tie."""
    from scripts.exactness.compare import _noise

    noise = _noise(SEEDED, 0, 30)
    tops = [[[-1.0, 10], [-1.0, 20]]]
    gap, listed = gap_of(SEEDED, 0, 20, 10, {"tops": tops, "logprobs": [-1.0]})
    assert listed and gap == pytest.approx(max(0.0, noise[10] - noise[20]))


def test_laws_are_told_apart() -> None:
    random = np.random.default_rng(3)

    def texts(p: list[float]) -> dict[str, list[list[int]]]:
        return {"law0": random.choice(4, (600, 3), p=p).tolist()}

    same = same_law(texts([0.4, 0.3, 0.2, 0.1]), texts([0.4, 0.3, 0.2, 0.1]))
    other = same_law(texts([0.4, 0.3, 0.2, 0.1]), texts([0.2, 0.3, 0.4, 0.1]))
    assert same["tests"] == 5 and same["p_value"] > 1e-3 and other["p_value"] < 1e-6
