"""A request ends with the token with which it would end without speculation, wherever in a chunk that token stands."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import ClassVar

import pytest

from tests.models import EOS, THINK_END
from tests.rig.oracle import assert_prefixes
from tests.rig.rig import Ask, Rig
from tests.rig.together import LOOPS, PROMPTS, assert_same, plain, together

# --- stop tokens, stop strings, limits -----------------------------------------------------------


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
    expected = oracle.outputs(asks)
    assert {output.finish["type"] for output in expected if output.finish} == {"stop", "length"}
    for k, loop in ((4, "synchronous"), (3, "overlapped")):
        found, _ = run_case(together, models, draft, k, loop, asks)
        assert_same(found, expected, asks)


@pytest.mark.parametrize("loop", LOOPS)
def test_end_of_text(run_case, models, oracle, loop) -> None:
    """A bias makes the model end its text somewhere by itself."""
    asks: list[Ask] = [
        (ids, 40, {"ignore_eos": False, "logit_bias": {str(EOS): bias}}) for ids in PROMPTS for bias in (3.0, 6.0)
    ]
    expected = oracle.outputs(asks)
    ended = [output for output in expected if output.finish and output.finish.get("matched") == EOS]
    assert len(ended) > 4 and len({len(output.ids) for output in ended}) > 3
    found, _ = run_case(together, models, "D_mid", 4, loop, asks)
    assert_same(found, expected, asks)


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
    expected = oracle.outputs(asks)
    found, _ = run_case(together, models, draft, 4, loop, asks)
    assert_same(found, expected, asks)


@pytest.mark.parametrize("draft", ["D_same", "D_bad"])
@pytest.mark.parametrize("k", [1, 5])
def test_never_one_token_more(run_case, models, oracle, draft, k) -> None:
    lengths = [1, 2, 3, 4, 5, 6, 7, 8]
    asks: list[Ask] = [(ids, length, {}) for ids, length in zip(PROMPTS, lengths)]
    found, _ = run_case(together, models, draft, k, "overlapped", asks)
    assert_prefixes(found, lengths, oracle.greedy(PROMPTS))


# --- every token as the end ----------------------------------------------------------------------


@pytest.mark.parametrize(("draft", "k"), [("D_same", 4), ("D_mid", 3), ("D_bad", 2)])
def test_any_token_can_be_the_end(run_case, models, oracle, draft, k) -> None:
    """Greedy tokens 3 to 14 of every text as end of text, half of the rows deaf to it."""
    asks: list[Ask] = []
    for prompt, text in zip(PROMPTS, oracle.greedy(PROMPTS)):
        for at in range(3, 15):
            deaf = (at + len(prompt)) % 2 == 0
            asks.append((prompt, 20, {"stop_token_ids": [text[at]], "ignore_eos": deaf, "logprobs": True}))
    found, _ = run_case(together, models, draft, k, "overlapped", asks)
    assert_same(found, oracle.outputs(asks), asks)
    assert all(output.usage == 20 for output, ask in zip(found, asks) if ask[2]["ignore_eos"])


@pytest.mark.parametrize("draft", ["D_same", "D_mid"])
def test_no_stop_before_min_new_tokens(run_case, models, oracle, draft) -> None:
    """Stop tokens are forbidden at the positions below the minimum, and only there."""
    asks: list[Ask] = []
    for number, (prompt, text) in enumerate(zip(PROMPTS[:3], oracle.greedy(PROMPTS)[:3])):
        for least in range(1, 13):
            for at in range(2, 13):
                if (least + at + number) % 3 == 0:
                    stops = {"stop_token_ids": [text[at]], "ignore_eos": False, "min_new_tokens": least}
                    asks.append((prompt, 16, stops))
    expected = oracle.outputs(asks)
    assert len({len(output.ids) for output in expected}) > 8
    found, _ = run_case(together, models, draft, 4, "overlapped", asks)
    assert_same(found, expected, asks)


# --- patterns ------------------------------------------------------------------------------------


def pattern_asks(models: Path, truth: list[list[int]]) -> list[Ask]:
    """Patterns that match where the text ends, that a later token would spoil, or that span tokens."""
    import re

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "T")
    asks: list[Ask] = []
    for prompt, text in zip(PROMPTS, truth):
        for at in range(1, 14):
            first, second = (tokenizer.decode(text[i : i + 1]) for i in (at, at + 1))
            if not (first.isascii() and first.isprintable() and len(first) == 1):
                continue
            shapes = [f"{re.escape(first)}$", f"{re.escape(first)}(?!{re.escape(second)})", f"[{re.escape(first)}].?$"]
            for number, shape in enumerate(shapes):
                limit = (20, at + 1, at + 2)[number]
                asks.append((prompt, limit, {"stop_regex": [shape], "ignore_eos": False, "logprobs": True}))
                asks.append((prompt, 20, {"stop_regex": [shape], "stop": [second], "ignore_eos": False}))
    return asks


@pytest.mark.parametrize(("draft", "k", "loop"), [("D_same", 4, "overlapped"), ("D_mid", 3, "synchronous")])
def test_stop_patterns(run_case, models, oracle, draft, k, loop) -> None:
    """``a$`` ends the text at its first ``a``, although the chunk goes on behind it."""
    asks = pattern_asks(models, oracle.greedy(PROMPTS))
    expected = oracle.outputs(asks)
    kinds = [output.finish["type"] for output in expected if output.finish]
    assert len(asks) > 40 and kinds.count("stop") > len(asks) / 2
    found, _ = run_case(together, models, draft, k, loop, asks)
    assert_same(found, expected, asks)


# --- what is counted -----------------------------------------------------------------------------


@pytest.mark.parametrize(("draft", "k", "loop"), [("D_same", 4, "overlapped"), ("D_mid", 3, "synchronous")])
def test_reasoning_tokens_never_exceed_the_completion(run_case, models, oracle, draft, k, loop) -> None:
    """Reasoning ends inside a chunk, or not at all before a stop string, stop token or the limit does."""
    options = {"reasoning_parser": "qwen3"}
    strings = [ask[2]["stop"] for ask in stop_string_asks(models, oracle.greedy(PROMPTS))][::7]
    wishes = [{"logit_bias": {str(THINK_END): bias}} for bias in (0.0, 6.0, 8.0)]
    wishes += [{"stop": stop, "ignore_eos": False} for stop in strings]
    wishes += [{"stop_token_ids": [text[6]], "ignore_eos": False} for text in oracle.greedy(PROMPTS)[:3]]
    reasoning = {"fields": {"require_reasoning": True}}
    asks: list[Ask] = [(PROMPTS[i % 8], 17 + i % 5, {**wish, **reasoning}) for i, wish in enumerate(wishes * 2)]
    expected = run_case(plain, models, asks, **options)
    assert any(0 < output.reasoning < output.usage for output in expected)
    assert any(output.reasoning == output.usage for output in expected)
    found, _ = run_case(together, models, draft, k, loop, asks, **options)
    assert_same(found, expected, asks)


@pytest.mark.parametrize("loop", LOOPS)
def test_streamed_requests_end_alike(run_case, models, oracle, loop) -> None:
    """A stream tells no token twice and none behind the stop: counts grow up to the whole."""
    stream = {"fields": {"stream": True}, "logprobs": True}
    asks: list[Ask] = [
        (ids, n, {**wish, **stream}) for ids, n, wish in stop_string_asks(models, oracle.greedy(PROMPTS))
    ]
    asks += [(ids, 21, stream) for ids in PROMPTS]
    found, _ = run_case(together, models, "D_same", 4, loop, asks)
    assert_same(found, oracle.outputs(asks), asks)
    for output in found:
        assert output.chunks == sorted(output.chunks) and output.chunks[-1] == len(output.ids)
    assert all(len(output.chunks) > 3 for output in found[-8:])


class Dashes:
    """A tokenizer with two ways to write one string."""

    eos_token_id, additional_stop_token_ids = 99, None
    pieces: ClassVar = {1: "x", 2: "-", 3: "----"}

    def decode(self, ids, **_) -> str:
        return "".join(self.pieces[index] for index in ids)

    def encode(self, text: str, **_) -> list[int]:
        return [3] if text == "----" else [0] * len(text)


@pytest.mark.parametrize("stop", [{"stop": "----"}, {"stop": "--"}, {"stop_regex": "x-{1,2}x"}])
def test_where_a_stop_is_found_does_not_depend_on_rounds(run_case, models, stop) -> None:
    """SGLang looks back as many tokens as a stop string has when it is encoded at once, and one."""

    def case(lengths: tuple[int, ...]) -> tuple[list[int], dict | None]:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        from sglang_psd.scheduler.stops import end_of_text, settled_len

        with Rig(models, "D_mid"):
            params, tokens = SamplingParams(max_new_tokens=50, **stop), [1, 2, 2, 2, 2, 1, 1]
            params.normalize(Dashes())
            req = Req("r", "", array("q", [1]), params, vocab_size=100, eos_token_ids={99})
            req.tokenizer, start = Dashes(), 0
            for length in lengths:
                chunk = tokens[start : start + length]
                taken = end_of_text(req, chunk[: settled_len(req, chunk)])
                req.output_ids.extend(chunk[:taken])
                req.update_finish_state(taken)
                start += taken
                if req.finished():
                    break
            return list(req.output_ids), req.finished_reason and req.finished_reason.to_json()

    token_by_token = run_case(case, (1,) * 7)
    for lengths in ((4, 3), (1, 3, 3), (2, 3, 2), (3, 3, 1), (7,), (5, 2)):
        assert run_case(case, lengths) == token_by_token, lengths
