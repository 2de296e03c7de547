"""What a request asks for: stops, limits, log probabilities, penalties, bias. Always the plain server's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models import EOS
from tests.rig.oracle import assert_prefixes, make_prompts
from tests.rig.rig import Ask, Output, Rig

LOOPS = ("synchronous", "overlapped")
PROMPTS = make_prompts(8)


def _together(
    models: Path, draft: str, k: int, loop: str, asks: list[Ask], **server_args: Any
) -> tuple[list[Output], list[list[int]]]:
    with Rig(models, draft, k, loop=loop, **server_args) as rig:
        rids = [rig.submit(ids, length, **options) for ids, length, options in asks]
        rig.run_until_done()
        rig.idle_check()
        drafts = [[row.drafts for row in rig.rounds_of(rid)] for rid in rids]
        return [rig.output(rid) for rid in rids], drafts


def assert_same(found: list[Output], plain: list[Output], asks: list[Ask]) -> None:
    """Tokens through the stop and finish reason."""
    for ask, ours, theirs in zip(asks, found, plain, strict=True):
        assert (ours.ids, ours.finish) == (theirs.ids, theirs.finish), f"{ask[1:]} differs"


# --- stops ---------------------------------------------------------------------------------------


def stop_token_asks(truth: list[list[int]]) -> list[Ask]:
    """A stop at every place of a chunk, with limits before, at and after it."""
    asks: list[Ask] = []
    for prompt, text in zip(PROMPTS, truth):
        for at in (0, 1, 2, 3, 4, 5, 9):
            for length in (at, at + 1, at + 2, at + 4, 20):
                if length:
                    asks.append((prompt, length, {"stop_token_ids": [text[at]], "ignore_eos": False}))
    return asks


@pytest.mark.parametrize("draft", ["D_same", "D_mid"])
def test_stop_tokens(run_case, models, oracle, draft) -> None:
    asks = stop_token_asks(oracle.greedy(PROMPTS)[:3])
    plain = oracle.outputs(asks)
    assert {output.finish["type"] for output in plain if output.finish} == {"stop", "length"}
    for k, loop in ((4, "synchronous"), (3, "overlapped")):
        found, _ = run_case(_together, models, draft, k, loop, asks)
        assert_same(found, plain, asks)


@pytest.mark.parametrize("loop", LOOPS)
def test_end_of_text(run_case, models, oracle, loop) -> None:
    """A bias makes the model end its text somewhere by itself."""
    asks: list[Ask] = [
        (ids, 40, {"ignore_eos": False, "logit_bias": {str(EOS): bias}}) for ids in PROMPTS for bias in (3.0, 6.0)
    ]
    plain = oracle.outputs(asks)
    ended = [output for output in plain if output.finish and output.finish.get("matched") == EOS]
    assert len(ended) > 4 and len({len(output.ids) for output in ended}) > 3
    found, _ = run_case(_together, models, "D_mid", 4, loop, asks)
    assert_same(found, plain, asks)


def stop_string_asks(models: Path, truth: list[list[int]]) -> list[Ask]:
    """Printable pieces of the text as stop strings, one and two tokens long, with limits around them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "T")
    asks: list[Ask] = []
    for prompt, text in zip(PROMPTS, truth):
        for at in range(1, 14):
            for width in (1, 2):
                piece = tokenizer.decode(text[at : at + width])
                if piece and piece.isascii() and piece.isprintable():
                    for length in (at + width - 1, at + width, at + width + 1, 20):
                        asks.append((prompt, length, {"stop": [piece], "ignore_eos": False}))
    return asks


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("draft", ["D_same", "D_mid"])
def test_stop_strings(run_case, models, oracle, draft, loop) -> None:
    asks = stop_string_asks(models, oracle.greedy(PROMPTS))
    assert len(asks) > 40
    plain = oracle.outputs(asks)
    found, _ = run_case(_together, models, draft, 4, loop, asks)
    assert_same(found, plain, asks)


@pytest.mark.parametrize("draft", ["D_same", "D_bad"])
@pytest.mark.parametrize("k", [1, 5])
def test_never_one_token_more(run_case, models, oracle, draft, k) -> None:
    lengths = [1, 2, 3, 4, 5, 6, 7, 8]
    asks: list[Ask] = [(ids, length, {}) for ids, length in zip(PROMPTS, lengths)]
    found, _ = run_case(_together, models, draft, k, "overlapped", asks)
    assert_prefixes(found, lengths, oracle.greedy(PROMPTS))


# --- log probabilities ---------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("draft", ["D_same", "D_mid"])
def test_logprobs(run_case, models, oracle, draft, loop) -> None:
    """With and without, and with different numbers of alternatives, in one batch."""
    wishes = [{"logprobs": True, "top_logprobs": n} for n in (0, 1, 5)] + [{}]
    asks: list[Ask] = [(ids, 9 + i, wishes[i % 4]) for i, ids in enumerate(PROMPTS)]
    asks += [(PROMPTS[0], 20, {"logprobs": True, "top_logprobs": 2, "stop_token_ids": [oracle.greedy(PROMPTS)[0][6]]})]
    plain = oracle.outputs(asks)
    found, _ = run_case(_together, models, draft, 4, loop, asks)
    assert_same(found, plain, asks)
    for (_, _, wish), ours, theirs in zip(asks, found, plain):
        assert len(ours.logprobs) == (len(ours.ids) if "logprobs" in wish else 0)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert len(ours.top_logprobs) == len(theirs.top_logprobs)
        for row, plain_row in zip(ours.top_logprobs, theirs.top_logprobs):
            assert len(row) == len(plain_row)
            assert [value for value, _ in row] == pytest.approx([value for value, _ in plain_row], abs=1e-4)
            assert [token for _, token in row] == [token for _, token in plain_row]


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
    plain = oracle.outputs(asks)
    free = oracle.greedy(PROMPTS)
    assert sum(output.ids != text[: len(output.ids)] for output, text in zip(plain, free)) >= 6, (
        "options without effect"
    )
    found, drafts = run_case(_together, models, draft, 3, loop, asks)
    assert_same(found, plain, asks)
    assert all(rounds[0] > 0 for rounds in drafts), "a request ran without drafts"


def test_penalties_survive_retraction(run_case, models, oracle) -> None:
    """Counts follow the request's output: a request that is retracted and read again goes on as if nothing had been."""
    asks: list[Ask] = [(ids, 40, {"frequency_penalty": 0.7, "repetition_penalty": 1.2}) for ids in PROMPTS[:9]]
    found, _ = run_case(_together, models, "D_mid", 3, "overlapped", asks, max_total_tokens=170)
    plain, _ = run_case(_together, models, "D_mid", 3, "overlapped", asks)
    assert sum(output.retractions for output in found) > 0, "the pool was not small enough for this test"
    assert_same(found, plain, asks)


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
    found, _ = run_case(_together, models, "D_mid", 3, loop, asks)
    truth = oracle.greedy(PROMPTS + PROMPTS)
    for ask, output, text in zip(asks, found, truth):
        assert len(output.ids) == 24
        if not ask[2]:
            assert output.ids == text[:24]


# --- structured output ---------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("draft", "library"),
    [("D_same", "llguidance"), ("D_same", "xgrammar"), ("D_mid", "xgrammar"), ("D_bad", "llguidance")],
)
def test_structured_output(run_case, models, draft, library, loop) -> None:
    """Constrained requests are drafted too: a draft that breaks the grammar is a rejection, and the text is plain's."""
    backend = {"grammar_backend": library}
    constrained: list[Ask] = [
        (PROMPTS[0], 20, {"regex": "[ab]{5}c", "ignore_eos": False}),
        (PROMPTS[1], 20, {"regex": "[ab]{5}c", "ignore_eos": False, "temperature": 1.0, "sampling_seed": 5}),
        (PROMPTS[2], 24, {"regex": "(yes|no|maybe)( (yes|no|maybe)){2}", "ignore_eos": False}),
        (PROMPTS[3], 40, {"json_schema": ENUM_SCHEMA, "ignore_eos": False}),
        (PROMPTS[4], 9, {"ebnf": 'root ::= "a" root | "b" root | "c"', "ignore_eos": False}),
        (PROMPTS[5], 18, {"regex": "[a-f]+", "frequency_penalty": 0.9, "ignore_eos": False}),
    ]
    asks = [*constrained, *((ids, 24, {}) for ids in PROMPTS[6:8])]

    def plain_case() -> list[Output]:
        with Rig(models, None, disable_radix_cache=True, **backend) as rig:
            return rig.run_each(asks)

    found, drafts = run_case(_together, models, draft, 3, loop, asks, **backend)
    plain = run_case(plain_case)
    # The seeded row has a law of its own; the plain server ignores seeds.
    assert_same(found[:1] + found[2:], plain[:1] + plain[2:], asks[:1] + asks[2:])
    assert all(len(output.ids) in (6, 7) for output in found[:2])
    assert all(any(rounds) for rounds in drafts), "a request ran without drafts"


ENUM_SCHEMA = '{"type": "object", "properties": {"c": {"enum": ["red", "green"]}}, "required": ["c"]}'
