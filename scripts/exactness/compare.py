"""Answers of an engine with PSD against those they have to equal, and what each difference costs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scripts.exactness.traffic import Request

DEFAULT_SEED = 42  # SGLang's, where deterministic inference is on
Answer = dict[str, Any]


@dataclass
class Difference:
    """The first token in which an answer differs.

    Attributes
    ----------
    number : int
        Of the request.
    kind : str
    position : int
        Index in the answer.
    ours, right : int
        The two tokens.
    gap : float
        By how much the reference preferred ``right``: difference of log probabilities, of perturbed ones where the
        request is seeded. At least this much where the reference did not list ``ours``.
    listed : bool
        Whether it did.
    bound : float
        Gap below which it is a tie: see ``tie_bound``.
    at_cut : bool
        One of the tokens stands where top-k, top-p or min-p cut the law: it may be in for one and out for the other.
    """

    number: int
    kind: str
    position: int
    ours: int
    right: int
    gap: float
    listed: bool
    bound: float
    at_cut: bool = False

    @property
    def wide(self) -> bool:
        """Whether no rounding explains it."""
        return not self.gap <= self.bound and not self.at_cut


@dataclass
class Verdict:
    """What was seen of one engine.

    Attributes
    ----------
    judged, compared : Counter
        Requests by kind: all that were looked at, and those of them whose whole answer was held against a reference.
    identical : int
        Of those compared.
    tokens : int
        In all answers.
    aborted : int
        Requests that an abort ended, here or at the reference: what they have in common was compared.
    differences, wide : list
        First differences, and those that no rounding explains.
    requests : list of str
        Of ``wide``.
    failures : list of str
    largest_value_difference : float
        Between log probabilities, in nats.
    """

    judged: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    identical: int = 0
    tokens: int = 0
    aborted: int = 0
    differences: list[Difference] = field(default_factory=list)
    wide: list[Difference] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    largest_value_difference: float = 0.0
    _told: tuple[int, int] = (0, 0)

    def news(self) -> list[str]:
        """What has come since the last call, in words."""
        said = []
        for found in self.differences[self._told[0] :]:
            more = "" if found.listed else " or more"
            above = f", ABOVE {found.bound:.3f}" if found.wide else ", at a cut" if found.at_cut else ""
            said.append(
                f"request {found.number} ({found.kind}) differs at token {found.position}: {found.ours}, not "
                f"{found.right}; gap {found.gap:.6f}{more}{above}"
            )
        said += [f"FAILURE {failure[:3000]}" for failure in self.failures[self._told[1] :]]
        self._told = len(self.differences), len(self.failures)
        return said

    def figures(self, first: int = 50) -> dict[str, Any]:
        """For JSON."""
        gaps = sorted((d.gap for d in self.differences), reverse=True)
        return {
            "judged": dict(self.judged),
            "compared": dict(self.compared),
            "identical": self.identical,
            "tokens": self.tokens,
            "aborted": self.aborted,
            "first_differences": len(self.differences),
            "at_a_cut": sum(found.at_cut for found in self.differences),
            "largest_gaps": [round(gap, 6) for gap in gaps[:10]],
            "gaps_above_bound": len(self.wide),
            "first_gaps_above_bound": [vars(d) for d in self.wide[:first]],
            "first_gaps_requests": self.requests[:first],
            "failures": len(self.failures),
            "first_failures": self.failures[:first],
            "largest_logprob_difference": round(self.largest_value_difference, 6),
        }


def gap_of(request: Request, position: int, ours: int, right: int, reference: Answer) -> tuple[float, bool]:
    """Gap and whether ``ours`` was listed; see ``Difference``."""
    tops = reference.get("tops", [])
    if position >= len(tops) or not tops[position]:
        return math.inf, False
    values = {token: value for value, token in tops[position]}
    noise = np.zeros(max([*values, ours, right]) + 1)
    if request.kind != "greedy":
        noise = _noise(request, position, len(noise))
    best = values.get(right, reference["logprobs"][position]) + noise[right]
    value = values.get(ours, min(values.values()))
    return max(0.0, float(best - value - noise[ours])), ours in values


def tie_bound(request: Request, bound: float) -> float:
    """The setting's bound, which is one on logits, in log probabilities: these are taken after the temperature."""
    return bound / (request.sampling.get("temperature") or 1.0)


def stands_at_cut(request: Request, tokens: tuple[int, int], row: list, bound: float) -> bool:
    """Whether a change of the log probabilities by ``bound`` could move one of ``tokens`` over an edge of the cut law.

    ``row`` is the reference's list of (log probability, token), most likely first, before the cuts. Its last entry may
    stand further down in truth, if the reference drew it: what is listed before it then is the least that is.
    """
    sampling, ranked = request.sampling, [token for _, token in row]
    values = np.array([value for value, _ in row])
    mass = np.concatenate([[0.0], np.cumsum(np.exp(values))])
    for token in tokens:
        if token not in ranked:
            continue  # less likely than all that is listed
        rank = ranked.index(token)
        at_top_p = abs(mass[rank] - sampling.get("top_p", 2.0)) < bound * mass[rank + 1] / 4
        lowest = values[0] + math.log(sampling["min_p"]) if sampling.get("min_p") else -math.inf
        edge = sampling.get("top_k", 0)
        at_top_k = 0 < edge < len(values) and min(abs(values[rank] - values[edge - 1 : edge + 1])) < bound
        if at_top_p or at_top_k or abs(values[rank] - lowest) < bound:
            return True
    return False


def _noise(request: Request, position: int, size: int) -> np.ndarray:
    """The Gumbel noise of a seeded request's token at ``position`` of its answer."""
    import torch

    from sglang_psd.noise import seeded_uniforms

    seed = torch.tensor([request.sampling.get("sampling_seed", DEFAULT_SEED)])
    place = torch.tensor([len(request.input_ids) + position])
    uniforms = seeded_uniforms(seed, place, size)[0].numpy()
    return -np.log(-np.log(uniforms))


def compare(request: Request, ours: list[Answer], right: list[Answer] | None, bound: float, verdict: Verdict) -> None:
    """Judge the answers to one request; ``right`` is None where only their form can be judged."""
    kind = request.kind[:3] if request.kind.startswith("law") else request.kind
    verdict.judged[kind] += 1
    if _never_began(request, ours):
        verdict.aborted += 1
        return
    for one in ours:
        problem = form_of(request, one)
        if problem is not None:
            verdict.failures.append(f"{request.number}: {problem}; {request} {one}")
            return
        verdict.tokens += len(one["ids"])
    if right is not None and _never_began(request, right):
        verdict.aborted += 1
        return
    if any("error" in one for one in right or ()):
        verdict.failures.append(f"{request.number}: the reference failed: {right}; {request}")
        return
    aborted = any(_aborted(one) for one in [*ours, *(right or ())])
    verdict.aborted += aborted
    if right is None:
        return
    same = all(_same(request, one, other, bound, verdict) for one, other in zip(ours, right, strict=True))
    if not aborted:
        verdict.compared[kind] += 1
        verdict.identical += same


def _never_began(request: Request, answers: list[Answer]) -> bool:
    """Whether it was aborted while its grammar was compiled: SGLang then answers with an error."""
    return request.abort_ms is not None and any("Aborted by AbortReq" in one.get("error", "") for one in answers)


def _aborted(answer: Answer) -> bool:
    return answer["finish"]["type"] == "abort"


def form_of(request: Request, one: Answer) -> str | None:
    """What is wrong with an answer whatever the right text is; None: nothing."""
    if "error" in one:
        return f"failed with {one['error']}"
    if one.get("broken_stream"):
        return "was streamed in parts that do not add up"
    if one["finish"] is None:
        return "has no finish reason"
    if one["finish"]["type"] == "abort":
        return None if request.abort_ms is not None else f"was aborted: {one['finish']}"
    if not one["usage"] == len(one["ids"]) <= request.length:
        return f"usage {one['usage']}, {len(one['ids'])} tokens, at most {request.length}"
    if one["reasoning"] > one["usage"]:
        return f"{one['reasoning']} reasoning tokens of {one['usage']}"
    if request.fields.get("return_logprob") and len(one.get("logprobs", ())) != len(one["ids"]):
        return f"{len(one.get('logprobs', ()))} log probabilities for {len(one['ids'])} tokens"
    stops = set(request.sampling.get("stop_token_ids", ())) if not request.sampling.get("ignore_eos") else set()
    if any(token in stops for token in one["ids"][:-1]):
        least = request.sampling.get("min_new_tokens", 0)
        if any(token in stops for token in one["ids"][least:-1]):
            return "a stop token in its middle"
    return None


def _same(request: Request, one: Answer, other: Answer, bound: float, verdict: Verdict) -> bool:
    """Whether an answer is the right one, or as much of it as both have; says so in ``verdict`` otherwise."""
    expected = other["ids"]
    position = next((i for i, (a, b) in enumerate(zip(one["ids"], expected)) if a != b), None)
    if position is not None:
        # While its grammar is compiled SGLang ends a request by giving it another prompt, and answers that.
        ends = [answer["finish"] for answer in (one, other)]
        if any(end["type"] == "abort" and end.get("message") == "Aborted by AbortReq." for end in ends):
            return True
        found = _difference(request, position, one, other, bound)
        verdict.differences.append(found)
        if found.wide:
            verdict.wide.append(found)
            verdict.requests.append(f"{request} {one}")
    if not _same_values(request, one, other, position, bound, verdict) or position is not None:
        return False
    if any(_aborted(a) and len(a["ids"]) <= len(b["ids"]) for a, b in ((one, other), (other, one))):
        return True
    both = [(len(a["ids"]), a["finish"], a["usage"], a["reasoning"], a["text"]) for a in (one, other)]
    if both[0] != both[1]:
        verdict.failures.append(f"{request.number}: ends differently: {both[0]} and {both[1]}; {request}")
        return False
    return True


def _difference(request: Request, position: int, one: Answer, other: Answer, bound: float) -> Difference:
    ours, right = one["ids"][position], other["ids"][position]
    gap, listed = gap_of(request, position, ours, right, other)
    found = Difference(request.number, request.kind, position, ours, right, gap, listed, tie_bound(request, bound))
    if request.kind != "greedy" and position < len(other.get("tops", [])):
        row = other["tops"][position]
        if right not in [token for _, token in row]:
            row = [*row, [other["logprobs"][position], right]]
        found.at_cut = stands_at_cut(request, (ours, right), row, found.bound)
    return found


def _same_values(
    request: Request, one: Answer, other: Answer, position: int | None, bound: float, verdict: Verdict
) -> bool:
    """Log probabilities up to the first difference, and of the prompt."""
    rows = [(one.get("logprobs", [])[:position], other.get("logprobs", []), tie_bound(request, bound))]
    if request.fields.get("logprob_start_len") == 0:
        rows.append((one.get("input_logprobs", []), other.get("input_logprobs", []), bound))
    for found, right, most in rows:
        for value, expected in zip(found, right):
            if value is None or expected is None or expected < -80:  # masked to nothing
                continue
            apart = abs(value - expected)
            verdict.largest_value_difference = max(verdict.largest_value_difference, apart)
            if not apart <= most:
                verdict.failures.append(f"{request.number}: log probability {value}, not {expected}; {request}")
                return False
    return True
