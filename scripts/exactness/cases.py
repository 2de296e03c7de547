"""Small inputs that engines with speculation are known to get wrong, as requests, and what is right about the answers.

Whatever is greedy has to be the plain engine's answer; ``Case.check`` looks at the rest. Numbers are those of the
project's list of cases; R27 is ``gpu_exactness.py``, R34, R36 and R39 are ``sglang-psd bench`` and ``tests/e2e``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.exactness.traffic import Request, chat_prompts
from tests.rig.fuzz import GRAMMARS, PROMPTS

Answer = dict[str, Any]
# Greedy text of each chat, as the plain engine gives it.
Probe = Sequence[Sequence[int]]
PROBE_LENGTH = 32
NUM_CHATS = 64
# Share of full rounds where the draft is the target. bfloat16 kernels of drafter and verify differ: about one token in
# a hundred is a tie that they resolve differently, and the rest of its chunk is lost with it.
LEAST_FULL = 0.9
LEAST_OF_FOUR_BITS = 2.0  # tokens a round, with three drafts; four fifths would be 2.95


@dataclass(frozen=True)
class Case:
    """Requests and what is right.

    Attributes
    ----------
    requests : callable
        From the probe.
    check : callable or None
        From requests, answers and drafts a round to what is wrong, in words.
    bursts : tuple of int
        How many requests are sent at once, burst after burst; empty: all.
    weights : str or None
        Checkpoint that the target takes before: ``target`` or ``noisy``.
    draft : str or None
        Checkpoint that the draft model takes with it.
    release : bool
        Give the memory back before, and take it again.
    """

    requests: Callable[[Probe], list[Request]]
    check: Callable[[list[Request], list[list[Answer]], int], list[str]] | None = None
    bursts: tuple[int, ...] = ()
    weights: str | None = None
    draft: str | None = None
    release: bool = False


_CHATS: list[list[int]] = []


def chats() -> list[list[int]]:
    """The prompts of most cases."""
    if not _CHATS:
        _CHATS.extend(chat_prompts(NUM_CHATS))
    return _CHATS


def request(number: int, length: int, *, prompt: list[int] | None = None, fields: dict | None = None, **wish: Any):
    """One request; greedy and deaf to the end of text unless told otherwise."""
    sampling = {"temperature": 0.0, "ignore_eos": True, **wish, "max_new_tokens": length}
    kind = "greedy" if sampling["temperature"] == 0 else "seeded" if "sampling_seed" in sampling else "sampled"
    ids = prompt if prompt is not None else chats()[number % NUM_CHATS]
    return Request(number, kind, ids, sampling, fields or {})


def greedy(count: int, length: int) -> Callable[[Probe], list[Request]]:
    """``count`` greedy requests."""
    return lambda probe: [request(i, length) for i in range(count)]


def eos(probe: Probe) -> list[Request]:
    """R16: a token of the text ends it, anywhere in a chunk; every other request does not care."""
    return [
        request(i, 48, ignore_eos=bool(i % 2), stop_token_ids=[probe[i % NUM_CHATS][3 + i % 12]]) for i in range(48)
    ]


def min_new_tokens(probe: Probe) -> list[Request]:
    """R17: the same, forbidden at first."""
    wishes = ({"min_new_tokens": 1 + i % 12, "stop_token_ids": [probe[i % NUM_CHATS][2 + i % 11]]} for i in range(66))
    return [request(i, 32, ignore_eos=False, **wish) for i, wish in enumerate(wishes)]


def biases(probe: Probe) -> list[Request]:
    """R18: tokens that are banned or forced."""
    banned = [request(i, 32, logit_bias={str(probe[i][i % 8]): -100.0}) for i in range(8)]
    return banned + [request(8 + i, 16, logit_bias={str(40 + i): 100.0}) for i in range(4)]


def check_biases(requests: list[Request], answers: list[list[Answer]], k: int) -> list[str]:
    """The banned token never appears, the forced one alone."""
    wrong = []
    for one, (answer,) in zip(requests, answers):
        ((token, value),) = one.sampling["logit_bias"].items()
        inside = [found == int(token) for found in answer["ids"]]
        if any(inside) if value < 0 else not all(inside):
            wrong.append(f"{one}: {answer['ids']}")
    return wrong


def temperatures(probe: Probe) -> list[Request]:
    """R19: the same question again and again."""
    free = [request(i, 12, prompt=PROMPTS[12], temperature=1.0) for i in range(50)]
    return free + [request(50 + i, 12, prompt=PROMPTS[12], temperature=1.0, top_k=50) for i in range(50)]


def check_distinct(requests: list[Request], answers: list[list[Answer]], k: int) -> list[str]:
    """Many different answers."""
    counts = [len({tuple(answer["ids"]) for (answer,) in answers[i : i + 50]}) for i in (0, 50)]
    return [] if min(counts) > 40 else [f"of 50 answers each {counts} are different"]


def mixed(probe: Probe) -> list[Request]:
    """R20: one greedy request beside fifteen sampled ones, twenty times."""
    kinds = [{"temperature": 0.0, "top_p": 0.9}, *({"temperature": 0.6 + 0.05 * i, "top_p": 0.9} for i in range(15))]
    return [request(16 * j + i, 24, prompt=chats()[i], **kind) for j in range(20) for i, kind in enumerate(kinds)]


def logprobs(probe: Probe) -> list[Request]:
    """R21: values of output and prompt, streamed or not, at temperature 0 and 1."""
    fields = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    return [request(i, 16, temperature=float(i % 4 == 3), fields={**fields, "stream": bool(i % 2)}) for i in range(32)]


def several(n: int) -> Callable[[Probe], list[Request]]:
    """R22: ``n`` answers to each question."""
    return lambda probe: [request(i, 24, temperature=float(i % 2), n=n) for i in range(8)]


def check_several(requests: list[Request], answers: list[list[Answer]], k: int) -> list[str]:
    """As many as asked for; sampled ones differ."""
    wrong = [f"{one}: {len(found)} answers" for one, found in zip(requests, answers) if len(found) != one.sampling["n"]]
    sampled = [found for one, found in zip(requests, answers) if one.kind == "sampled"]
    distinct = sum(len({tuple(answer["ids"]) for answer in found}) for found in sampled)
    return wrong if distinct > len(sampled) else [*wrong, "sampled answers are all the same"]


def full_rounds(requests: list[Request], answers: list[list[Answer]], k: int) -> list[str]:
    """R24, R29, R30: the draft is the target, so nearly every round is a full one."""
    needed = sum(-(-(len(answer["ids"]) - 1) // (k + 1)) for found in answers for answer in found)
    rounds = sum(answer["rounds"] for found in answers for answer in found)
    return [] if needed >= LEAST_FULL * rounds else [f"{rounds} rounds, where {needed} would have done"]


def many_drafts(requests: list[Request], answers: list[list[Answer]], k: int) -> list[str]:
    """R30: a target of four bits agrees with its draft of sixteen in four tokens of five."""
    tokens = sum(len(answer["ids"]) - 1 for found in answers for answer in found)
    rounds = sum(answer["rounds"] for found in answers for answer in found)
    return [] if tokens > LEAST_OF_FOUR_BITS * rounds else [f"{tokens} tokens in {rounds} rounds"]


def grammars(probe: Probe) -> list[Request]:
    """R26: constrained requests beside free ones."""
    return [request(i, 40, ignore_eos=False, **(GRAMMARS[i % 5] if i % 5 < len(GRAMMARS) else {})) for i in range(60)]


def check_grammars(requests: list[Request], answers: list[list[Answer]], k: int) -> list[str]:
    """What ended by itself is valid."""
    wrong = []
    for one, (answer,) in zip(requests, answers):
        if answer["finish"]["type"] != "stop":
            continue
        pattern, schema = one.sampling.get("regex"), one.sampling.get("json_schema")
        try:
            valid = re.fullmatch(pattern, answer["text"]) is not None if pattern else True
            valid = valid and (json.loads(answer["text"])["c"] in ("red", "green") if schema else True)
        except ValueError:
            valid = False
        if not valid:
            wrong.append(f"{one}: {answer['text']!r}")
    return wrong


def long_ones(probe: Probe) -> list[Request]:
    """R28: four requests that fill a pool of 2,048 tokens."""
    prompts = [[*chats()[i], *probe[i], *chats()[i + 4]][:180] for i in range(4)]
    return [request(i, 470 - len(prompt), prompt=prompt) for i, prompt in enumerate(prompts)]


def endings(probe: Probe) -> list[Request]:
    """R33: one long prefix, many endings."""
    prefix = [token for chat in chats()[:40] for token in chat][:1500]
    return [request(i, 8, prompt=[*prefix, *PROMPTS[i % 12][1:]]) for i in range(33)]


def check_cached(requests: list[Request], answers: list[list[Answer]], k: int) -> list[str]:
    """All but the first find the prefix."""
    cached = [answer["cached"] for (answer,) in answers[1:]]
    return [] if min(cached) >= 1400 else [f"cached tokens: {sorted(cached)[:5]} …"]


def check_figures(requests: list[Request], answers: list[list[Answer]], k: int) -> list[str]:
    """R38: the figures of each request add up."""
    wrong = []
    for found in answers:
        for answer in found:
            spec = answer["spec"]
            length = spec.get("spec_accept_length")
            if not spec.get("spec_verify_ct") or length is None:
                wrong.append(f"no figures: {spec}")
            elif (
                abs(length - len(answer["ids"]) / spec["spec_verify_ct"]) > 1e-3
                or len(answer["ids"]) - 1 > (k + 1) * spec["spec_verify_ct"]  # the first token is the prefill's
            ):
                wrong.append(f"{len(answer['ids'])} tokens: {spec}")
            elif not 0 <= spec.get("spec_accept_rate", 0) <= 1:
                wrong.append(f"{spec}")
    return wrong[:5]


def streams(probe: Probe) -> list[Request]:
    """R40: streamed parts of many tokens."""
    return [request(i, 48, fields={"stream": True}) for i in range(32)]


CASES: dict[str, Case] = {
    "R16": Case(eos),
    "R17": Case(min_new_tokens),
    "R18": Case(biases, check_biases),
    "R19": Case(temperatures, check_distinct),
    "R20": Case(mixed, bursts=(16,) * 20),
    "R21": Case(logprobs),
    "R22": Case(several(3), check_several),
    "R22 n=8": Case(several(8), check_several),
    "R23": Case(greedy(NUM_CHATS, 256), check_figures),
    "R24": Case(greedy(32, 128), full_rounds),
    "R26": Case(grammars, check_grammars),
    "R28": Case(long_ones),
    "R29": Case(greedy(8, 100), full_rounds),
    "R30": Case(greedy(16, 100), full_rounds),
    "R30 4-bit": Case(greedy(16, 100), many_drafts),
    "R31": Case(greedy(32, 64), check_figures),
    "R32": Case(lambda probe: [request(i, 4 + 7 * i % 23) for i in range(91)], bursts=(1, 2, 3, 5, 7, 9, 31, 33)),
    "R33": Case(endings, check_cached, bursts=(1, 32)),
    "R37 own": Case(greedy(8, 64), full_rounds),
    "R37 other": Case(greedy(8, 64), weights="noisy"),
    "R37 both": Case(greedy(8, 64), full_rounds, weights="noisy", draft="noisy"),
    "R37 back": Case(greedy(8, 64), full_rounds, weights="target", draft="target"),
    "R37 resumed": Case(greedy(8, 64), full_rounds, release=True),
    "R40": Case(streams),
}


@dataclass(frozen=True)
class Server:
    """An engine and the cases it is asked.

    Attributes
    ----------
    cases : tuple of str
    k : int
        Drafts a round; 0: without speculation.
    draft : str
        ``tiny-draft``, ``tiny-target``, ``tiny-eagle3``, ``padded`` or ``permuted``.
    target : str
        ``target``, ``gptq`` or ``awq``.
    more : dict
        Further keywords of the engine.
    compared : bool
        Whether its greedy answers have to be the plain engine's.
    refused : str or None
        What it says instead of starting.
    """

    cases: tuple[str, ...]
    k: int = 3
    draft: str = "tiny-draft"
    target: str = "target"
    mode: str = "parallel"
    more: dict[str, Any] = field(default_factory=dict)
    compared: bool = True
    refused: str | None = None


MAIN = ("R16", "R17", "R18", "R19", "R20", "R21", "R22", "R23", "R26", "R33", "R40")
SERVERS: dict[str, Server] = {
    "main": Server(MAIN),
    "sequential": Server(MAIN, k=5, mode="sequential", more={"page_size": 16}),
    "k1": Server(("R23",), k=1),
    "k2": Server(("R23",), k=2, mode="sequential"),
    "k8": Server(("R23", "R40", "R16"), k=8),
    "same_k3": Server(("R24",), draft="tiny-target"),
    "same_k7": Server(("R24",), k=7, draft="tiny-target", mode="sequential"),
    "four": Server(("R22 n=8", "R28"), more={"max_running_requests": 4, "max_total_tokens": 2048}),
    "graphs_to_8": Server(("R32",), more={"cuda_graph_max_bs_decode": 8}),
    "padded": Server(("R29",), draft="padded"),
    "permuted": Server((), draft="permuted", refused="disagree on token"),
    "fp8": Server(("R30",), draft="tiny-target", more={"quantization": "fp8"}, compared=False),
    "gptq": Server(("R30 4-bit",), draft="tiny-target", target="gptq", compared=False),
    "awq": Server(("R30 4-bit",), draft="tiny-target", target="awq", compared=False),
    "head": Server(("R31", "R21"), draft="tiny-eagle3"),
    "weights": Server(("R37 own", "R37 other", "R37 both", "R37 back"), draft="tiny-target"),
    "released": Server(("R37 own", "R37 resumed"), draft="tiny-target", more={"enable_memory_saver": True}),
}
