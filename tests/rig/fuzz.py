"""Random servers with random traffic, for ``test_fuzz.py`` and ``scripts/gpu_exactness.py``.

A ``Scenario`` is plain data that prints as Python: a failure is pasted into the test as an example and stays there.

Everything is drawn from one ``random.Random``: hypothesis, asked for each choice, repeats itself so much in lists of
eighty requests that three in four are copies of another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
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
    session : str or None
        Conversation that it goes on with, once the last turn there has ended.
    """

    prompt: int
    cut: int
    tail: tuple[int, ...]
    length: int
    wish: dict[str, Any]
    wait: int = 0
    abort: int | None = None
    session: str | None = None

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
        if self.wish.get("temperature", 0.0) == 0.0 or self.wish.get("top_k") == 1:
            return "greedy"
        return "seeded" if "sampling_seed" in self.wish else "sampled"


@dataclass(frozen=True)
class Scenario:
    """A server and its traffic.

    Attributes
    ----------
    draft, k, mode, loop, options
        ``Rig``'s.
    calls : list of Call
    pauses : dict of int to str
        Calls before which the server is paused for two turns, and how.
    target : str
    config : dict
        ``Rig``'s.
    drafter : dict
        What is wrong with the drafter from the start: ``wire`` (name and seed, see ``proxy.py``), ``kv_tokens`` (its
        pool), ``mailbox`` (rows), ``spares``.
    events : dict of int to list of tuple
        What happens before a call, see ``fuzz_player.py``: a name and its arguments.
    retract_every : int
        Forwards after which a slot that decodes retracts a request without need; 0: never.
    """

    draft: str
    k: int
    mode: str
    loop: str
    options: dict[str, Any]
    calls: list[Call]
    pauses: dict[int, str] = field(default_factory=dict)
    target: str = "T"
    config: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    events: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    retract_every: int = 0


def _sometimes(rng: Random, one_in: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """One of ``choices``, or an empty dictionary."""
    return dict(rng.choice(choices)) if rng.randint(1, one_in) == 1 else {}


LETTERS = [chr(c) for c in range(97, 123)]
PATTERNS = ["[a-z]$", "[A-Za-z](?![0-9])", "[!-~]{2}", "^.{3}", "(?<=a)b"]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.0, "top_p": 0.9},
]
# Not repetition together with another one, which SGLang applies in an order of its own.
PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.4, "presence_penalty": 0.5},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.8},
]
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[ab]{5}c"},
    {"regex": "[a-f]{2,9}(x|y)"},
    {"json_schema": '{"type": "object", "properties": {"c": {"enum": ["red", "green"]}}, "required": ["c"]}'},
    {"ebnf": 'root ::= "a" root | "b" root | "c"'},
]


def random_stops(rng: Random) -> dict[str, Any]:
    """Ends that random text of 320 tokens meets within a few steps."""
    first = rng.randint(5, 280)
    ends: list[dict[str, Any]] = [
        {"stop_token_ids": list(range(first, first + 30))},
        {"stop": LETTERS[rng.randint(0, 10) :]},
        {"stop_regex": [rng.choice(PATTERNS)]},
        {"logit_bias": {str(EOS): rng.choice([3.0, 6.0])}},
        {"stop": LETTERS, "stop_token_ids": list(range(first, first + 15)), "stop_regex": ["[0-9]$"]},
    ]
    return {"ignore_eos": False, **rng.choice(ends)}


def random_wish(rng: Random) -> dict[str, Any]:
    """What a request asks for."""
    wish = _sometimes(rng, 2, SAMPLING)
    if wish.get("temperature", 0.0) > 0 and rng.random() < 0.5:
        wish["sampling_seed"] = rng.choice([rng.randint(-3, 3), rng.randint(-(2**40), 2**40)])
    grammar = _sometimes(rng, 6, GRAMMARS)
    wish.update(_sometimes(rng, 4, PENALTIES))
    fields: dict[str, Any] = {}
    if grammar:
        wish.update(grammar, ignore_eos=False)
        if rng.random() < 0.5:
            fields["require_reasoning"] = True
            wish["logit_bias"] = {str(THINK_END): rng.choice([5.0, 7.0])}
    else:
        if rng.randint(1, 3) == 1:
            wish.update(random_stops(rng))
        wish.update(_sometimes(rng, 5, [{"min_new_tokens": least} for least in range(1, 10)]))
    if rng.randint(1, 5) == 1:
        wish["logit_bias"] = {**wish.get("logit_bias", {}), str(rng.randint(5, 319)): 4.0, "9": -100.0}
    values = _sometimes(rng, 4, [{"logprobs": True}, {"logprobs": True, "top_logprobs": 3}])
    wish.update(values)
    if values and rng.randint(1, 3) == 1:
        fields["logprob_start_len"] = 0
    if rng.randint(1, 3) == 1:
        fields["stream"] = True
    return {**wish, "fields": fields} if fields else wish


def random_call(rng: Random) -> Call:
    """One request."""
    prompt = rng.randrange(len(PROMPTS))
    wish = random_wish(rng)
    length = rng.randint(1, LONGEST_NEW)
    if "min_new_tokens" in wish:
        wish["min_new_tokens"] = min(wish["min_new_tokens"], length)
    return Call(
        prompt=prompt,
        cut=rng.randint(1, len(PROMPTS[prompt])),
        tail=tuple(rng.randint(5, 319) for _ in range(rng.randint(0, 3))),
        length=length,
        wish=wish,
        wait=rng.choice([0, 0, 0, 1, 2, 5]),
        abort=rng.randint(0, 9) if rng.randint(1, 5) == 1 else None,
    )


def random_server(rng: Random, k: int) -> dict[str, Any]:
    """A server's arguments; the pool holds the longest request and its drafts."""
    page = rng.choice([1, 1, 16, 64])
    options: dict[str, Any] = {"page_size": page}
    options.update(_sometimes(rng, 2, [{"chunked_prefill_size": max(16, page)}]))
    options.update(_sometimes(rng, 4, [{"disable_radix_cache": True}]))
    options.update(_sometimes(rng, 2, [{"max_running_requests": n} for n in (1, 2, 3, 7)]))
    options["grammar_backend"] = rng.choice(["xgrammar", "llguidance"])
    options["reasoning_parser"] = "qwen3"
    # SGLang shortens an answer for which there is less than the prompt's pages, the answer and one page more
    # (``Scheduler.init_req_max_new_tokens``); a server with a larger pool would not.
    prompt_pages = -(-(max(map(len, PROMPTS)) + 3) // page)
    least = prompt_pages * page + LONGEST_NEW + k + 2 + page + 1
    if rng.random() < 0.5:
        options["max_total_tokens"] = -(-least // page) * page + page * rng.randint(0, 3)
        options["schedule_conservativeness"] = rng.choice([1.0, 0.05])
    return options


def random_scenario(rng: Random, num_calls: int) -> Scenario:
    """A server and ``num_calls`` requests."""
    k = rng.randint(1, 8)
    return Scenario(
        draft=rng.choice(["D_same", "D_mid", "D_mid", "D_bad", "D_hid", "D_voc", "D_ctx"]),
        k=k,
        mode=rng.choice(["parallel", "parallel", "sequential"]),
        loop=rng.choice(["overlapped", "overlapped", "synchronous"]),
        options=random_server(rng, k),
        calls=[random_call(rng) for _ in range(num_calls)],
        pauses={rng.randrange(num_calls): rng.choice(["retract", "in_place"]) for _ in range(rng.randint(0, 2))},
    )


@st.composite
def scenarios(draw: st.DrawFn, num_calls: int) -> Scenario:
    """``random_scenario``, for hypothesis."""
    return random_scenario(draw(st.randoms(use_true_random=True)), num_calls)
