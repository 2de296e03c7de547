"""Custom logit processors: code of the clients, called at every position of a chunk as the plain server calls it."""

from __future__ import annotations

import math

import pytest
import torch

from tests.rig.oracle import assert_prefixes
from tests.rig.rig import Ask, Rig
from tests.rig.together import LOOPS, PROMPTS, assert_same, plain, together

OPTIONS = {"enable_custom_logit_processor": True}
SEEN: list = []
BANNED = (1, 2)
PAIR = (1, SEEN)


class Elsewhere:
    items: list = []  # noqa: RUF012


def harmless(banned) -> bool:
    return math.isfinite(banned)


def remember() -> None:
    SEEN.append(1)


def processors() -> dict[str, str]:
    """Processors as a client sends them."""
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor, DisallowedTokensLogitsProcessor

    class Ban(CustomLogitProcessor):
        def __call__(self, logits, custom_param_list=None):
            for row, params in zip(logits, custom_param_list):
                row[params["banned"]] = float("-inf")
            return logits

    class NoRepeats(CustomLogitProcessor):
        """Looks at the output so far."""

        def __call__(self, logits, custom_param_list=None):
            for row, params in zip(logits, custom_param_list):
                row[list(params["__req__"].output_ids)] = float("-inf")
            return logits

    class Alternate(CustomLogitProcessor):
        """Counts its calls where it may: odd and even tokens take turns."""

        def __call__(self, logits, custom_param_list=None):
            for row, params in zip(logits, custom_param_list):
                params.setdefault("calls", []).append(len(params["__req__"].output_ids))
                row[len(params["calls"]) % 2 :: 2] = float("-inf")
            return logits

    class Memory(CustomLogitProcessor):
        """Counts its calls where nobody can follow."""

        def __call__(self, logits, custom_param_list=None):
            self.calls = getattr(self, "calls", 0) + 1
            logits[:, self.calls % 2 :: 2] = float("-inf")
            return logits

    class Broken(CustomLogitProcessor):
        def __call__(self, logits, custom_param_list=None):
            raise KeyError("nothing here")

    class Late(CustomLogitProcessor):
        """Fails after some tokens, and for a token that greedy text does not have."""

        def __call__(self, logits, custom_param_list=None):
            for params in custom_param_list:
                output = params["__req__"].output_ids
                if len(output) == params["last"]:
                    raise ValueError("enough")
                if list(output) != params["text"][: len(output)]:
                    raise ValueError("this was never generated")
            return logits

    class Plans(CustomLogitProcessor):
        """Leaves what cannot be copied in its parameters."""

        def __call__(self, logits, custom_param_list=None):
            for row, params in zip(logits, custom_param_list):
                if "plan" not in params and len(params["__req__"].output_ids) >= params["begin"]:
                    params["plan"] = (token for token in params["banned"])
                if "plan" in params:
                    row[next(params["plan"], 0)] = float("-inf")
            return logits

    class Keeps(CustomLogitProcessor):
        """Names the request in its parameters once more."""

        def __call__(self, logits, custom_param_list=None):
            for row, params in zip(logits, custom_param_list):
                mine = params.setdefault("mine", {"req": params["__req__"]})
                row[(len(mine["req"].output_ids) + 1) % 2 :: 2] = float("-inf")
            return logits

    class CountsAndFails(CustomLogitProcessor):
        def __call__(self, logits, custom_param_list=None):
            for row, params in zip(logits, custom_param_list):
                params["calls"] = params.get("calls", 0) + 1
                row[params["calls"] % 2 :: 2] = float("-inf")
                if params["calls"] == params["last"]:
                    raise ValueError("enough")
            return logits

    def empty() -> str:
        class Empty(CustomLogitProcessor):
            def __call__(self, logits, custom_param_list=None):
                if custom_param_list is None:
                    later()
                return logits

        sent = Empty.to_str()
        later = None
        return sent

    classes = (Ban, NoRepeats, Alternate, Memory, Broken, Late, Plans, Keeps, CountsAndFails)
    return {cls.__name__: cls.to_str() for cls in (*classes, DisallowedTokensLogitsProcessor)} | {"Empty": empty()}


def wish(code: dict[str, str], name: str, **params) -> dict:
    """What asks for a processor."""
    return {"custom_params": params, "fields": {"custom_logit_processor": code[name]}}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("draft", ["D_same", "D_mid"])
def test_custom_logit_processors(run_case, models, oracle, draft, loop) -> None:
    """They see the output so far and what they left in their parameters; requests are drafted all the same."""
    code, greedy = processors(), oracle.greedy(PROMPTS)
    asks: list[Ask] = [
        (ids, 20, {**wish(code, "Ban", banned=text[2]), **more})
        for ids, text, more in zip(PROMPTS, greedy, ({}, {"frequency_penalty": 0.7}, {"logprobs": True}))
    ]
    asks += [(ids, 20, wish(code, "NoRepeats")) for ids in PROMPTS[3:5]]
    asks += [(ids, 24, wish(code, "Alternate")) for ids in PROMPTS[5:8]]
    # One call for both fails, because their parameters differ; SGLang would end with it.
    asks += [
        (ids, 12, wish(code, "DisallowedTokensLogitsProcessor", token_ids=[text[1]]))
        for ids, text in zip(PROMPTS[:2], greedy)
    ]
    asks += [(ids, 20, {"custom_params": {"banned": 5}}) for ids in PROMPTS[2:4]]
    expected = run_case(plain, models, asks, **OPTIONS)
    found, drafts = run_case(together, models, draft, 3, loop, asks, **OPTIONS)
    assert_same(found, expected, asks)
    assert all(len(set(output.ids)) == 20 for output in found[3:5])
    assert all(a % 2 != b % 2 for output in found[5:8] for a, b in zip(output.ids, output.ids[1:]))
    assert all(any(rounds) for rounds in drafts), "a request ran without drafts"
    accepted = sum(output.accepted for output in found[:10])
    assert accepted > 5, f"processors cost nearly every draft: {accepted} were accepted"


@pytest.mark.parametrize("name", ["Alternate", "NoRepeats"])
def test_seeded_requests_with_processors(run_case, models, name) -> None:
    """The text is that of a server whose drafts are never right, drawn from the processed law."""
    code = processors()
    asks: list[Ask] = [
        (ids, 20, {**wish(code, name), "temperature": 0.8, "top_p": 0.9, "sampling_seed": seed})
        for seed, ids in enumerate(PROMPTS)
    ]
    found, _ = run_case(together, models, "D_mid", 4, "overlapped", asks, **OPTIONS)
    expected, _ = run_case(together, models, "D_bad", 1, "synchronous", asks, **OPTIONS)
    assert [output.ids for output in found] == [output.ids for output in expected]


def test_processors_survive_retraction(run_case, models) -> None:
    code = processors()
    asks: list[Ask] = [(ids, 40, wish(code, "Alternate")) for ids in PROMPTS]
    expected = run_case(plain, models, asks, **OPTIONS)
    found, _ = run_case(together, models, "D_mid", 3, "overlapped", asks, max_total_tokens=170, **OPTIONS)
    assert any(output.retractions for output in found)
    assert_same(found, expected, asks)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_prompt_read_in_parts_is_no_call(run_case, models, loop) -> None:
    """What a processor remembers does not depend on how its prompt was cut."""
    code = processors()
    asks: list[Ask] = [(PROMPTS[5] * 3, 20, wish(code, "Alternate")), *((ids, 20, {}) for ids in PROMPTS[:3])]
    expected = run_case(plain, models, asks, **OPTIONS)
    for chunk in (8, 16):
        found, _ = run_case(together, models, "D_mid", 3, loop, asks, chunked_prefill_size=chunk, **OPTIONS)
        assert_same(found, expected, asks)


def test_a_processor_that_cannot_be_followed_runs_without_drafts(run_case, models) -> None:
    code = processors()
    asks: list[Ask] = [(PROMPTS[0], 20, wish(code, "Memory")), *((ids, 20, {}) for ids in PROMPTS[1:4])]
    expected = run_case(plain, models, asks, **OPTIONS)
    found, drafts = run_case(together, models, "D_mid", 3, "overlapped", asks, **OPTIONS)
    assert_same(found, expected, asks)
    assert not any(drafts[0]) and all(any(rounds) for rounds in drafts[1:])


def test_a_processor_that_fails_ends_its_request_alone(run_case, models, oracle) -> None:
    code, greedy = processors(), oracle.greedy(PROMPTS)
    asks: list[Ask] = [(ids, 20, {}) for ids in PROMPTS[:3]]
    asks += [(PROMPTS[3], 20, wish(code, "Broken"))]
    asks += [(PROMPTS[4], 20, {"fields": {"custom_logit_processor": "not even JSON"}})]
    # Rejected drafts are outputs that never were: what a processor says to them counts for nothing.
    asks += [(PROMPTS[5], 20, wish(code, "Late", last=99, text=greedy[5]))]
    asks += [(PROMPTS[6], 20, wish(code, "Late", last=7, text=greedy[6]))]
    for draft in ("D_mid", "D_bad", "D_same"):
        found, _ = run_case(together, models, draft, 3, "overlapped", asks, **OPTIONS)
        assert_prefixes([*found[:3], found[5]], [20] * 4, [*greedy[:3], greedy[5]])
        for output, words in zip(
            (*found[3:5], found[6]), ("failed (KeyError", "cannot be read", "failed (ValueError: eno")
        ):
            assert output.finish is not None and output.finish["type"] == "abort" and words in output.finish["message"]
        assert found[6].ids[:7] == greedy[6][:7] and len(found[6].ids) <= 8


@pytest.mark.parametrize("draft", ["D_same", "D_mid"])
def test_parameters_that_cannot_be_copied(run_case, models, draft) -> None:
    """From the call that makes them so the request runs without drafts; the server lives, the text is the plain one."""
    code = processors()
    banned = [text % 300 for text in range(7, 300, 13)]
    asks: list[Ask] = [
        (ids, 20, wish(code, "Plans", begin=begin, banned=banned)) for ids, begin in zip(PROMPTS, (0, 1, 2, 3, 9))
    ]
    asks += [(PROMPTS[5], 20, wish(code, "Empty")), (PROMPTS[6], 20, wish(code, "Alternate"))]
    expected = run_case(plain, models, asks, **OPTIONS)
    found, drafts = run_case(together, models, draft, 3, "overlapped", asks, **OPTIONS)
    assert_same(found, expected, asks)
    assert any(drafts[4][:4]) and not any(drafts[4][-6:]) and not any(drafts[5]) and any(drafts[6])


def test_a_request_named_in_its_parameters_stays_itself(run_case, models) -> None:
    code = processors()
    asks: list[Ask] = [(ids, 20, wish(code, "Keeps")) for ids in PROMPTS]
    expected = run_case(plain, models, asks, **OPTIONS)
    found, drafts = run_case(together, models, "D_mid", 3, "overlapped", asks, **OPTIONS)
    assert_same(found, expected, asks)
    assert all(any(rounds) for rounds in drafts)


@pytest.mark.parametrize("draft", ["D_same", "D_bad"])
def test_a_call_that_fails_for_one_counts_once_for_the_others(run_case, models, draft) -> None:
    code = processors()
    asks: list[Ask] = [(ids, 20, wish(code, "CountsAndFails", last=99)) for ids in PROMPTS[:4]]
    expected = run_case(plain, models, asks, **OPTIONS)
    failing: list[Ask] = [
        (PROMPTS[4 + i], 20, wish(code, "CountsAndFails", last=last)) for i, last in enumerate((1, 4, 7))
    ]
    found, _ = run_case(together, models, draft, 3, "overlapped", [*asks, *failing], **OPTIONS)
    assert_same(found[:4], expected, asks)
    assert [output.finish["type"] for output in found[4:] if output.finish] == ["abort"] * 3


@pytest.mark.parametrize("end", [{"stop_regex": ["^.{6}"]}, {"max_new_tokens": 6}])
def test_a_failure_behind_the_end_is_none(run_case, models, oracle, end) -> None:
    """Whatever ends a request: a plain server would not have called its processor again."""
    code, greedy = processors(), oracle.greedy(PROMPTS)
    length = end.pop("max_new_tokens", 20)
    stopped = run_case(plain, models, [(ids, length, dict(end)) for ids in PROMPTS], **OPTIONS)
    asks: list[Ask] = [
        (ids, length, {**wish(code, "Late", last=len(output.ids), text=text), **end})
        for ids, text, output in zip(PROMPTS, greedy, stopped)
    ]
    for k in (3, 7):
        found, _ = run_case(together, models, "D_same", k, "overlapped", asks, **OPTIONS)
        assert_same(found, stopped, asks)


@pytest.mark.parametrize("short", [5, 6, 8])
def test_a_processor_that_remembers_moves_with_its_request(run_case, models, short) -> None:
    """One slot empties, and a request of the other one moves there; it must not get a processor that knows nothing."""
    code = processors()
    asks: list[Ask] = [(ids, length, {}) for ids, length in zip(PROMPTS, (short, short, short, 40, 40))]
    asks.append((PROMPTS[5], 40, wish(code, "Memory")))
    expected = run_case(plain, models, asks, **OPTIONS)

    def case() -> tuple[list, int]:
        with Rig(models, "D_mid", 3, loop="overlapped", **OPTIONS) as rig:
            outputs = rig.run(asks)
            return outputs, rig.scheduler.psd_stats.moves

    found, moves = run_case(case)
    assert moves > 0
    assert_same(found, expected, asks)


def stateful_and_not() -> dict:
    """Classes, and whether they keep state."""
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor, Qwen3ThinkingBudgetLogitProcessor

    outside: dict = {}
    number = 0

    class Pure(CustomLogitProcessor):
        LIMIT = 3

        def helper(self, params):
            return [params["x"] for _ in range(self.LIMIT)]

        def __call__(self, logits, custom_param_list=None):
            banned = custom_param_list[0]["banned"]
            assert all(banned == params["banned"] for params in custom_param_list), BANNED
            assert isinstance(logits, torch.Tensor) and harmless(banned)
            return logits

    class OnItself(Pure):
        def __call__(self, logits, custom_param_list=None):
            self.calls = 1
            return logits

    class OnItsClass(Pure):
        def __call__(self, logits, custom_param_list=None):
            type(self).LIMIT += 1
            return logits

    class InItsClass(Pure):
        seen: dict = {}  # noqa: RUF012

    class Made(Pure):
        def __init__(self):
            self.seen = []

    class InAGlobal(Pure):
        def __call__(self, logits, custom_param_list=None):
            SEEN.append(1)
            return logits

    class InAVariable(Pure):
        def __call__(self, logits, custom_param_list=None):
            outside["calls"] = 1
            return logits

    class InANumber(Pure):
        def __call__(self, logits, custom_param_list=None):
            nonlocal number
            number += 1
            return logits

    class BySetattr(Pure):
        def __call__(self, logits, custom_param_list=None):
            setattr(logits, "calls", 1)  # noqa: B010
            return logits

    class InADefault(Pure):
        def __call__(self, logits, custom_param_list=None, calls=[]):  # noqa: B006
            calls.append(1)
            return logits

    class InAHelper(Pure):
        def __call__(self, logits, custom_param_list=None):
            remember()
            return logits

    class InAProperty(Pure):
        @property
        def limit(self):
            return SEEN.append(1)

    class InAnotherClass(Pure):
        def __call__(self, logits, custom_param_list=None):
            Elsewhere.items.append(1)
            return logits

    class InATuple(Pure):
        def __call__(self, logits, custom_param_list=None):
            PAIR[1].append(1)
            return logits

    class ThroughItsDict(Pure):
        def __call__(self, logits, custom_param_list=None):
            self.__dict__["calls"] = 1
            return logits

    class ThroughVars(Pure):
        def __call__(self, logits, custom_param_list=None):
            vars(self)["calls"] = 1
            return logits

    stateful = (OnItself, OnItsClass, InItsClass, Made, InAGlobal, InAVariable, InANumber, BySetattr)
    stateful += (InADefault, InAHelper, InAProperty, InAnotherClass, InATuple, ThroughItsDict, ThroughVars)
    return {Pure: False, Qwen3ThinkingBudgetLogitProcessor: False, **dict.fromkeys(stateful, True)}


def test_which_processors_may_remember_their_calls(sglang_loaded) -> None:
    from sglang_psd.target.processors import keeps_state

    for cls, expected in stateful_and_not().items():
        assert keeps_state(cls.to_str()) == expected, cls.__name__
