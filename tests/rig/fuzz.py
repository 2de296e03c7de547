"""Random servers with random traffic: the strategies behind ``test_fuzz.py``.

A ``Scenario`` is plain data that prints as Python: a failure is pasted into the test as an example and stays there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tests.models import BOS, EOS, THINK_END
from tests.rig.oracle import make_prompts
from tests.rig.rig import Ask

PROMPTS = [*make_prompts(12), *([BOS] + [(7 * j + j * j + i) % 250 + 10 for j in range(90)] for i in range(3))]
LONGEST_NEW = 24


@dataclass(frozen=True)
class Call:
    """One request and what happens around it.

    Attributes
    ----------
    prompt, cut, tail : int, int, tuple of int
        Number of the prompt, how many of its tokens are taken, and what follows them.
    length : int
        Most new tokens.
    wish : dict
        Sampling parameters and what else ``Rig.submit`` takes.
    wait : int
        Turns before it is sent.
    abort : int or None
        Turns after which it is aborted.
    """

    prompt: int
    cut: int
    tail: tuple[int, ...]
    length: int
    wish: dict[str, Any]
    wait: int = 0
    abort: int | None = None

    @property
    def ids(self) -> list[int]:
        """The prompt."""
        return [*PROMPTS[self.prompt][: self.cut], *self.tail]

    @property
    def ask(self) -> Ask:
        """As ``Rig.run`` takes it."""
        return self.ids, self.length, self.wish

    @property
    def kind(self) -> str:
        """``greedy``, ``seeded`` or ``sampled``: what its text can be compared with."""
        if self.wish.get("temperature", 0.0) == 0.0:
            return "greedy"
        return "seeded" if "sampling_seed" in self.wish else "sampled"


@dataclass(frozen=True)
class Scenario:
    """A server and its traffic; ``options`` are ``Rig``'s, ``pauses`` the calls before which it is paused."""

    draft: str
    k: int
    mode: str
    loop: str
    options: dict[str, Any]
    calls: list[Call]
    pauses: dict[int, str] = field(default_factory=dict)


def _sometimes(strategy: st.SearchStrategy, one_in: int) -> st.SearchStrategy:
    """A dictionary of ``strategy``, or an empty one."""
    return st.integers(1, one_in).flatmap(lambda n: strategy if n == 1 else st.just({}))


PATTERNS = ["[a-z]$", "[A-Za-z](?![0-9])", "[!-~]{2}", "^.{3}", "(?<=a)b"]


@st.composite
def stop_wishes(draw) -> dict[str, Any]:
    """Ends that random text of 320 tokens meets within a few steps."""
    first = draw(st.integers(5, 280))
    how = draw(st.sampled_from(["tokens", "strings", "pattern", "end", "both"]))
    letters = [chr(c) for c in range(97, 123)]
    ends = {
        "tokens": {"stop_token_ids": list(range(first, first + 30))},
        "strings": {"stop": letters[draw(st.integers(0, 10)) :]},
        "pattern": {
            "stop_regex": [draw(st.sampled_from(["[a-z]$", "[A-Za-z](?![0-9])", "[!-~]{2}", "^.{3}", "(?<=a)b"]))]
        },
        "end": {"logit_bias": {str(EOS): draw(st.sampled_from([3.0, 6.0]))}},
        "both": {"stop": letters, "stop_token_ids": list(range(first, first + 15)), "stop_regex": ["[0-9]$"]},
    }
    return {"ignore_eos": False, **ends[how]}


@st.composite
def penalty_wishes(draw) -> dict[str, Any]:
    """Penalties; not two kinds at once, which SGLang applies in an order of its own."""
    return draw(
        st.sampled_from(
            [
                {"frequency_penalty": 0.7},
                {"presence_penalty": 1.5},
                {"frequency_penalty": -0.4, "presence_penalty": 0.5},
                {"repetition_penalty": 1.4},
                {"repetition_penalty": 0.8},
            ]
        )
    )


SAMPLING = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.0, "top_p": 0.9},
]
GRAMMARS = [
    {"regex": "[ab]{5}c"},
    {"regex": "[a-f]{2,9}(x|y)"},
    {"json_schema": '{"type": "object", "properties": {"c": {"enum": ["red", "green"]}}, "required": ["c"]}'},
    {"ebnf": 'root ::= "a" root | "b" root | "c"'},
]


@st.composite
def wishes(draw) -> dict[str, Any]:
    """What a request asks for."""
    wish: dict[str, Any] = dict(draw(_sometimes(st.sampled_from(SAMPLING), 2)))
    if wish.get("temperature", 0.0) > 0 and draw(st.booleans()):
        wish["sampling_seed"] = draw(st.integers(-3, 2**40))
    grammar = draw(_sometimes(st.sampled_from(GRAMMARS), 6))
    wish.update(draw(_sometimes(penalty_wishes(), 4)))
    fields: dict[str, Any] = {}
    if grammar:
        wish.update(grammar, ignore_eos=False)
        if draw(st.booleans()):
            fields["require_reasoning"] = True
            wish["logit_bias"] = {str(THINK_END): draw(st.sampled_from([5.0, 7.0]))}
    else:
        wish.update(draw(_sometimes(stop_wishes(), 3)))
        wish.update(draw(_sometimes(st.fixed_dictionaries({"min_new_tokens": st.integers(1, 9)}), 5)))
    if draw(st.integers(1, 5)) == 1:
        wish["logit_bias"] = {**wish.get("logit_bias", {}), str(draw(st.integers(5, 319))): 4.0, "9": -100.0}
    values = draw(_sometimes(st.sampled_from([{"logprobs": True}, {"logprobs": True, "top_logprobs": 3}]), 4))
    wish.update(values)
    if values and draw(st.integers(1, 3)) == 1:
        fields["logprob_start_len"] = 0
    if draw(st.integers(1, 3)) == 1:
        fields["stream"] = True
    return {**wish, "fields": fields} if fields else wish


@st.composite
def calls(draw) -> Call:
    """One request."""
    prompt = draw(st.integers(0, len(PROMPTS) - 1))
    wish = draw(wishes())
    length = draw(st.integers(1, LONGEST_NEW))
    if "min_new_tokens" in wish:
        wish["min_new_tokens"] = min(wish["min_new_tokens"], length)
    return Call(
        prompt=prompt,
        cut=draw(st.integers(1, len(PROMPTS[prompt]))),
        tail=tuple(draw(st.lists(st.integers(5, 319), max_size=3))),
        length=length,
        wish=wish,
        wait=draw(st.sampled_from([0, 0, 0, 1, 2, 5])),
        abort=draw(st.one_of(st.none(), st.none(), st.none(), st.none(), st.integers(0, 9))),
    )


@st.composite
def server_options(draw, k: int) -> dict[str, Any]:
    """A server's arguments; the pool holds the longest request and its drafts."""
    options: dict[str, Any] = {"page_size": draw(st.sampled_from([1, 1, 16, 64]))}
    page = options["page_size"]
    options.update(draw(_sometimes(st.just({"chunked_prefill_size": max(16, page)}), 2)))
    options.update(draw(_sometimes(st.just({"disable_radix_cache": True}), 4)))
    options.update(draw(_sometimes(st.sampled_from([{"max_running_requests": n} for n in (1, 2, 3, 7)]), 2)))
    options["grammar_backend"] = draw(st.sampled_from(["xgrammar", "llguidance"]))
    options["reasoning_parser"] = "qwen3"
    # SGLang shortens an answer for which there is less than the prompt's pages, the answer and one page more
    # (``Scheduler.init_req_max_new_tokens``); a server with a larger pool would not.
    prompt_pages = -(-(max(map(len, PROMPTS)) + 3) // page)
    least = prompt_pages * page + LONGEST_NEW + k + 2 + page + 1
    if draw(st.booleans()):
        options["max_total_tokens"] = -(-least // page) * page + page * draw(st.integers(0, 3))
        options["schedule_conservativeness"] = draw(st.sampled_from([1.0, 0.05]))
    return options


@st.composite
def scenarios(draw, num_calls: int) -> Scenario:
    """A server and ``num_calls`` requests."""
    k = draw(st.integers(1, 8))
    pauses = draw(st.dictionaries(st.integers(0, num_calls - 1), st.sampled_from(["retract", "in_place"]), max_size=2))
    return Scenario(
        draft=draw(st.sampled_from(["D_same", "D_mid", "D_mid", "D_bad", "D_hid", "D_voc", "D_ctx"])),
        k=k,
        mode=draw(st.sampled_from(["parallel", "parallel", "sequential"])),
        loop=draw(st.sampled_from(["overlapped", "overlapped", "synchronous"])),
        options=draw(server_options(k)),
        calls=draw(st.lists(calls(), min_size=num_calls, max_size=num_calls)),
        pauses=pauses,
    )
