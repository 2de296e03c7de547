"""Parameters of a request: penalties, bias, custom processors, neighbours of another kind. Always the plain answer."""

from __future__ import annotations

import pytest

from tests.models import EOS
from tests.rig.oracle import assert_prefixes
from tests.rig.rig import Ask
from tests.rig.together import LOOPS, PROMPTS, assert_same, together

# --- penalties, bias, other kinds in one batch ---------------------------------------------------

PENALISED = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"min_new_tokens": 7, "ignore_eos": False, "logit_bias": {str(EOS): 9.0}},
    {"frequency_penalty": 1.0, "logit_bias": {"45": 4.0, "46": -3.0}},
]
BIASED = [{"logit_bias": {"45": 6.0}}, {"logit_bias": {str(token): -100.0 for token in range(5, 160)}}, {}]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("draft", ["D_same", "D_mid"])
def test_penalties_and_bias(run_case, models, oracle, draft, loop) -> None:
    asks: list[Ask] = [(ids, 14 + 2 * i, options) for i, (ids, options) in enumerate(zip(PROMPTS, PENALISED + BIASED))]
    expected = oracle.outputs(asks)
    free = oracle.greedy(PROMPTS)
    assert sum(output.ids != text[: len(output.ids)] for output, text in zip(expected, free)) >= 6, (
        "options without effect"
    )
    found, drafts = run_case(together, models, draft, 3, loop, asks)
    assert_same(found, expected, asks)
    assert all(rounds[0] > 0 for rounds in drafts), "a request ran without drafts"


def test_penalties_survive_retraction(run_case, models, oracle) -> None:
    """Counts follow the request's output: a request that is retracted and read again goes on as if nothing had been."""
    asks: list[Ask] = [(ids, 40, {"frequency_penalty": 0.7, "repetition_penalty": 1.2}) for ids in PROMPTS[:9]]
    found, _ = run_case(together, models, "D_mid", 3, "overlapped", asks, max_total_tokens=170)
    expected, _ = run_case(together, models, "D_mid", 3, "overlapped", asks)
    assert sum(output.retractions for output in found) > 0, "the pool was not small enough for this test"
    assert_same(found, expected, asks)


@pytest.mark.parametrize("loop", LOOPS)
def test_greedy_beside_sampled(run_case, models, oracle, loop) -> None:
    """Greedy rows do not notice their neighbours, and seeded ones do not either."""
    kinds = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 1.0, "sampling_seed": 7},
    ]
    asks: list[Ask] = [(ids, 24, kinds[i % 5]) for i, ids in enumerate(PROMPTS + PROMPTS)]
    found, _ = run_case(together, models, "D_mid", 3, loop, asks)
    truth = oracle.greedy(PROMPTS + PROMPTS)
    for ask, output, text in zip(asks, found, truth):
        assert len(output.ids) == 24
        if not ask[2]:
            assert output.ids == text[:24]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_bias_bans_and_forces(run_case, models, oracle, loop) -> None:
    """The drafter, an equal model without the bias, always proposes the banned token; another bias in every row."""
    banned = [
        (ids, 32, {"logit_bias": {str(token): -100 for token in text[:4]}})
        for ids, text in zip(PROMPTS[:4], oracle.greedy(PROMPTS))
    ]
    forced = [(ids, 12, {"logit_bias": {str(50 + i): 100}}) for i, ids in enumerate(PROMPTS[4:])]
    asks: list[Ask] = [*banned, *forced]
    found, drafts = run_case(together, models, "D_same", 4, loop, asks)
    assert_same(found, oracle.outputs(asks), asks)
    for (_, _, wish), output in zip(banned, found):
        assert not {str(token) for token in output.ids} & wish["logit_bias"].keys()
    assert [set(output.ids) for output in found[4:]] == [{50 + i} for i in range(4)]
    assert all(rounds[0] > 0 for rounds in drafts)


def test_temperature_zero_ignores_the_cuts(run_case, models, oracle) -> None:
    """Greedy with top-p, top-k or min-p is greedy, beside sampled rows and alone; ``top_k`` 1 is as well."""
    greedy = [{"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.3}, {"temperature": 1.0, "top_k": 1}]
    asks: list[Ask] = [(ids, 24, wish) for ids, wish in zip(PROMPTS, greedy)]
    crowd: list[Ask] = [(ids, 24, {"temperature": 1.3}) for ids in PROMPTS]
    truth = oracle.greedy(PROMPTS)
    for others in ([], crowd):
        found, _ = run_case(together, models, "D_mid", 3, "overlapped", [*asks, *others])
        assert_prefixes(found[:4], [24] * 4, truth[:4])


def test_many_answers_at_temperature_one(run_case, models) -> None:
    """Fifty times the same prompt: nearly as many texts, also with ``top_k`` and no temperature."""
    asks: list[Ask] = [(PROMPTS[0], 8, {"temperature": 1.0, "top_k": k}) for k in (2**30, 50) for _ in range(50)]
    found, _ = run_case(together, models, "D_mid", 3, "overlapped", asks)
    assert all(len({tuple(o.ids) for o in part}) > 40 for part in (found[:50], found[50:]))
