"""What the comparison of engines side by side forgives and what not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from scripts.exactness.compare import Verdict, compare, gap_of, stands_at_cut
from scripts.exactness.law import same_law
from scripts.exactness.quantised import AWQ_ORDER, awq_tensors, gptq_tensors
from scripts.exactness.settings import BFLOAT16, FLOAT32, PLAIN, engine_keywords
from scripts.exactness.traffic import Request, random_requests

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
    figures = verdict.figures()
    assert figures["compared"] == {"greedy": 1} and figures["identical"] == 1 and not verdict.news()


def test_a_tie_may_go_either_way_and_is_told() -> None:
    verdict = judged(GREEDY, ids=[10, 11, 22, 99], text="abxy")
    assert [round(found.gap, 4) for found in verdict.differences] == [0.0001] and not verdict.wide
    assert "differs at token 2" in verdict.news()[0] and not verdict.news()
    assert verdict.figures()["compared"] == {"greedy": 1} and not verdict.identical


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
    verdict = judged(GREEDY, **changed)
    assert len(verdict.failures) == 1 and not verdict.identical


CUT: dict[str, Any] = {"ids": [10, 11], "usage": 2, "text": "ab", "finish": {"type": "abort"}}
NEVER_BEGAN = {"error": "ValueError: Aborted by AbortReq."}


@pytest.mark.parametrize("whose", ["ours", "the reference's"])
@pytest.mark.parametrize("cut", [{**RIGHT, **CUT}, NEVER_BEGAN])
def test_an_aborted_answer_is_a_beginning(whose: str, cut: dict[str, Any]) -> None:
    """Both engines with PSD abort, each when it comes to it."""
    aborted = Request(9, "seeded", [1], SEEDED.sampling, {}, abort_ms=5)
    sides = ([cut], [RIGHT]) if whose == "ours" else ([RIGHT], [cut])
    verdict = Verdict()
    compare(aborted, *sides, 1e-3, verdict)
    assert not verdict.failures and not verdict.wide and verdict.aborted == 1
    assert not verdict.compared and verdict.judged == {"seeded": 1}


@pytest.mark.parametrize("whose", ["ours", "the reference's"])
def test_an_aborted_answer_begins_right(whose: str) -> None:
    aborted = Request(9, "greedy", [1], GREEDY.sampling, {}, abort_ms=5)
    cut = {**RIGHT, **CUT, "ids": [10, 20], "tops": [RIGHT["tops"][0], [[-0.2, 20], [-3.0, 11]]]}
    sides = ([cut], [RIGHT]) if whose == "ours" else ([RIGHT], [cut])
    verdict = Verdict()
    compare(aborted, *sides, 1e-3, verdict)
    assert verdict.wide
    verdict = Verdict()
    longer = {**RIGHT, "ids": [10], "usage": 1, "text": "a", "finish": {"type": "stop", "matched": 10}}
    sides = ([{**RIGHT, **CUT}], [longer]) if whose == "ours" else ([longer], [{**RIGHT, **CUT}])
    compare(aborted, *sides, 1e-3, verdict)
    assert "ends differently" in verdict.failures[0]


@pytest.mark.parametrize("answer", [NEVER_BEGAN, {"error": "ValueError: no"}])
def test_a_reference_that_fails_is_a_failure(answer: dict[str, Any]) -> None:
    """Nobody aborts this request."""
    verdict = Verdict()
    compare(GREEDY, [RIGHT], [answer], 1e-3, verdict)
    assert "the reference failed" in verdict.failures[0]


@pytest.mark.parametrize(
    ("temperature", "apart", "fine"), [(0.5, 1.5e-3, True), (1.0, 1.5e-3, False), (2.0, 8e-4, False)]
)
def test_the_bound_is_one_on_logits(temperature: float, apart: float, fine: bool) -> None:
    """Log probabilities are those after the temperature, which stretches what rounding did to the logits."""
    request = Request(8, "seeded", [1], {**SEEDED.sampling, "temperature": temperature})
    verdict = Verdict()
    compare(request, [{**RIGHT, "logprobs": [-0.1 - apart, -0.2, -0.7, -0.4]}], [RIGHT], 1e-3, verdict)
    assert (not verdict.failures) == fine


def test_a_token_below_all_that_is_listed_may_stand_at_the_cut() -> None:
    """Request 2,687 on GPUs: 24 alternatives listed, the 26th drawn, with 0.798 of the law before it and top-p 0.8."""
    from scripts.exactness.compare import _noise

    for top_p, at_cut in ((0.8, True), (0.99, False)):
        request = Request(3, "seeded", [1], {**SEEDED.sampling, "top_p": top_p})
        noise = _noise(request, 0, 400)
        row = [[float(np.log(0.79 / 24)), token] for token in range(100, 124)]
        ours = int(np.argmin(noise[100:124])) + 100
        right = int(np.argmax(noise[200:400])) + 200
        assert noise[right] - 6.0 - noise[ours] - row[0][0] > 0.5  # a gap that no rounding explains
        reference = {**RIGHT, "ids": [right, 11, 12, 13], "logprobs": [-6.0, *RIGHT["logprobs"][1:]]}
        reference["tops"] = [row, *RIGHT["tops"][1:]]
        verdict = Verdict()
        compare(request, [{**reference, "ids": [ours, 11, 12, 13]}], [reference], 0.5, verdict)
        assert [found.at_cut for found in verdict.differences] == [at_cut] and bool(verdict.wide) != at_cut


@pytest.mark.parametrize(("rank", "at_cut"), [(1, False), (2, True), (3, True), (4, True), (6, False)])
def test_tokens_near_the_edge_of_top_k_are_at_a_cut(rank: int, at_cut: bool) -> None:
    """The edge lies between the fourth and the fifth; the third is as good as both, the second and the last are not."""
    values = [-0.1, -2.0, -3.0, -3.1, -3.2, -3.3, -5.0]
    row = [(value, 10 + i) for i, value in enumerate(values)]
    request = Request(0, "seeded", [1], {"temperature": 1.0, "top_k": 4}, {}, None)
    assert stands_at_cut(request, (10 + rank, 999), row, 0.5) == at_cut


def test_a_deterministic_plain_engine_is_asked_only_what_it_can_answer() -> None:
    """Its sampler fails an assertion where a seed, here SGLang's default one, meets a cut law."""
    kinds = {request.kind for request in random_requests(0, 300, law_every=0)}
    assert kinds == {"greedy", "seeded", "sampled"}
    assert any(request.kind.startswith("law") for request in random_requests(0, 300, law_every=10))


def test_the_reference_counts_what_was_generated() -> None:
    """SGLang's overlap scheduler penalises one token late: docs/features.md."""
    for setting in (FLOAT32, BFLOAT16):
        assert engine_keywords(setting, PLAIN, "cuda", 2)["disable_overlap_schedule"]


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


def unpacked(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Four-bit numbers of words along the last dimension, back in their places."""
    eights = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], dim=-1)
    return eights[..., [order.index(i) for i in range(8)]].reshape(*words.shape[:-1], -1)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_four_bits_stand_for_the_weights(method: str) -> None:
    """Unpacked as the formats say, (number - zero) * scale is the weight but for half a step."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    made = {"gptq": gptq_tensors, "awq": awq_tensors}[method](weight)
    straight = tuple(range(8))
    if method == "gptq":
        numbers, zeros = unpacked(made["qweight"].t(), straight).t(), unpacked(made["qzeros"], straight) + 1
        assert made["qweight"].shape == (256 // 8, 64) and made["g_idx"].tolist() == [0] * 128 + [1] * 128
    else:
        numbers, zeros = (unpacked(made[name], AWQ_ORDER) for name in ("qweight", "qzeros"))
        assert made["qweight"].shape == (256, 64 // 8)
    steps = made["scales"].float().repeat_interleave(128, dim=0)
    restored = (numbers - zeros.repeat_interleave(128, dim=0)).float() * steps
    # Symmetric around zero: -8 is left unused, and the largest weight is 7 steps.
    assert ((restored - weight.float().t()).abs() <= 0.51 * steps).all()
