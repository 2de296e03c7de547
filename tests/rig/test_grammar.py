"""Structured output: valid, and token for token the plain server's, whatever the drafter proposes."""

from __future__ import annotations

import json
import re

import pytest
from transformers import AutoTokenizer

from tests.models import EOS, THINK_END
from tests.rig.rig import Ask
from tests.rig.together import LOOPS, PROMPTS, assert_same, plain, together

LIBRARIES = ("xgrammar", "llguidance")
ENUM_SCHEMA = '{"type": "object", "properties": {"c": {"enum": ["red", "green"]}}, "required": ["c"]}'
NAME_SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}'
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "=f=", "schema": json.loads(ENUM_SCHEMA), "end": "=e="}],
    "triggers": ["=f="],
}


@pytest.fixture(scope="module")
def tokenizer(models):
    """The target's."""
    return AutoTokenizer.from_pretrained(models / "T")


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
        (PROMPTS[3], 40, {"json_schema": ENUM_SCHEMA, "ignore_eos": False, "logprobs": True}),
        (PROMPTS[4], 9, {"ebnf": 'root ::= "a" root | "b" root | "c"', "ignore_eos": False}),
        (PROMPTS[5], 18, {"regex": "[a-f]+", "frequency_penalty": 0.9, "ignore_eos": False}),
    ]
    asks = [*constrained, *((ids, 24, {}) for ids in PROMPTS[6:8])]
    found, drafts = run_case(together, models, draft, 3, loop, asks, **backend)
    expected = run_case(plain, models, asks, **backend)
    # The seeded row has a law of its own; the plain server ignores seeds.
    assert_same(found[:1] + found[2:], expected[:1] + expected[2:], asks[:1] + asks[2:])
    assert all(len(output.ids) in (6, 7) for output in found[:2])
    assert all(any(rounds) for rounds in drafts), "a request ran without drafts"


@pytest.mark.parametrize(("library", "draft"), [("xgrammar", "D_bad"), ("llguidance", "D_same")])
def test_fifty_constrained_requests(run_case, models, tokenizer, library, draft) -> None:
    """More than run at once, sampled and greedy, free ones between; what is complete is valid."""
    kinds = [
        {"json_schema": NAME_SCHEMA},
        {"regex": "[ab]{5}c"},
        {"json_schema": ENUM_SCHEMA, "temperature": 1.0},
        {},
        {"regex": "[0-9]{2,9}x", "stop": ["77", "x"]},
    ]
    asks: list[Ask] = [(PROMPTS[i % 8], 48, {**kinds[i % 5], "ignore_eos": False}) for i in range(50)]
    for i in range(2, 50, 10):
        asks[i][2]["sampling_seed"] = i  # how many of the others are complete in time is a matter of luck
    options = {"grammar_backend": library, "max_running_requests": 9}
    found, _ = run_case(together, models, draft, 4, "overlapped", asks, **options)
    greedy = [i for i, (_, _, wish) in enumerate(asks) if "temperature" not in wish]
    expected = run_case(plain, models, [asks[i] for i in greedy], **options)
    assert_same([found[i] for i in greedy], expected, [asks[i] for i in greedy])
    complete = []
    for (_, _, wish), output in zip(asks, found):
        if "json_schema" in wish and output.finish is not None and output.finish["type"] == "stop":
            value = json.loads(tokenizer.decode(output.ids, skip_special_tokens=True), strict=False)
            assert value.get("c") in ("red", "green") or isinstance(value["name"], str)
            complete.append(wish)
        elif wish.get("regex") == "[ab]{5}c":
            assert re.fullmatch("[ab]{5}c", tokenizer.decode(output.ids, skip_special_tokens=True))
    assert sum("temperature" not in wish or "sampling_seed" in wish for wish in complete) >= 5


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("draft", "loop"), [("D_same", "overlapped"), ("D_mid", "synchronous")])
def test_structural_tags(run_case, models, tokenizer, library, draft, loop) -> None:
    """Free text until a tag opens, which may be in the middle of a chunk; then the schema, then free text again."""
    open_tag = [tokenizer.convert_tokens_to_ids(c) for c in "=f="]
    bias = {str(token): 7.0 for token in open_tag}
    asks: list[Ask] = [
        (ids, 40, {"structural_tag": json.dumps(TAGS), "ignore_eos": False, "logit_bias": bias if i % 2 else None})
        for i, ids in enumerate(PROMPTS)
    ]
    expected = run_case(plain, models, asks, grammar_backend=library)
    texts = [tokenizer.decode(output.ids) for output in expected]
    assert any(re.search(r'=f=\s*{\s*"c"', text) for text in texts), texts
    found, _ = run_case(together, models, draft, 4, loop, asks, grammar_backend=library)
    assert_same(found, expected, asks)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("draft", "k", "loop"), [("D_same", 4, "overlapped"), ("D_mid", 3, "synchronous")])
def test_a_grammar_that_begins_where_reasoning_ends(run_case, models, tokenizer, library, draft, k, loop) -> None:
    """The chunk in which reasoning ends is free before and constrained behind the end of reasoning."""
    options = {"grammar_backend": library, "reasoning_parser": "qwen3"}
    asks: list[Ask] = [
        (
            PROMPTS[i % 8],
            40,
            {
                "regex": "[ab]{5}c",
                "ignore_eos": False,
                "logit_bias": {str(THINK_END): 5.5 + i % 4, str(EOS): -3.0},
                "fields": {"require_reasoning": True},
            },
        )
        for i in range(16)
    ]
    expected = run_case(plain, models, asks, **options)
    ended = {output.reasoning % (k + 1) for output in expected if output.finish and output.finish["type"] == "stop"}
    assert len(ended) > 2, "reasoning always ended at the same place of a chunk"
    found, drafts = run_case(together, models, draft, k, loop, asks, **options)
    assert_same(found, expected, asks)
    assert any(any(rounds) for rounds in drafts)


def test_grammars_survive_retraction(run_case, models) -> None:
    """The matcher stays where it was while its request is read again."""
    wishes = [{"regex": "[a-f]{30}"}, {"json_schema": NAME_SCHEMA}, {"ebnf": 'root ::= "a" root | "b" root | "c" root'}]
    asks: list[Ask] = [(ids, 40, {**wishes[i % 3], "ignore_eos": False}) for i, ids in enumerate(PROMPTS)]
    crowded = {"max_total_tokens": 150, "schedule_conservativeness": 0.05}
    found, _ = run_case(together, models, "D_mid", 3, "overlapped", asks, **crowded)
    assert sum(output.retractions for output in found) > 0, "the pool was not small enough for this test"
    assert_same(found, run_case(plain, models, asks), asks)


@pytest.mark.parametrize("loop", LOOPS)
def test_stops_inside_constrained_text(run_case, models, loop) -> None:
    """Stop strings, patterns and tokens end it before its grammar is complete."""
    ends = [{"stop": ["ab"]}, {"stop_regex": ["a$"]}, {"stop_token_ids": [70, 71]}, {"stop": ["zz"]}]
    asks: list[Ask] = [
        (ids, 12 + i, {"regex": "[a-z]{20}", "ignore_eos": False, "logprobs": True, **ends[i % 4]})
        for i, ids in enumerate(PROMPTS)
    ]
    found, _ = run_case(together, models, "D_same", 4, loop, asks)
    assert_same(found, run_case(plain, models, asks), asks)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_grammar_that_cannot_be_read_ends_its_request_alone(run_case, models, oracle, library) -> None:
    asks: list[Ask] = [(PROMPTS[0], 12, {}), (PROMPTS[1], 12, {"regex": "("}), (PROMPTS[2], 12, {"json_schema": "{"})]
    found, _ = run_case(together, models, "D_mid", 3, "overlapped", asks, grammar_backend=library)
    assert found[0].ids == oracle.greedy(PROMPTS[:1])[0][:12]
    assert all(output.finish is not None and output.finish["type"] == "abort" for output in found[1:])
