"""Answers of an engine with PSD against those they have to equal, and what each difference costs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from scripts.exactness.traffic import Request

DEFAULT_SEED = 42  # SGLang's, where deterministic inference is on
# Fewest observations, of both samples together, that a cell of the law test needs.
MIN_OBSERVED = 10
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
    at_cut: bool = False


@dataclass
class Verdict:
    """What was seen of one engine; ``wide`` are differences above the bound, ``requests`` theirs."""

    compared: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    aborted: int = 0
    differences: list[Difference] = field(default_factory=list)
    wide: list[Difference] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    largest_value_difference: float = 0.0
    _told: tuple[int, int] = (0, 0)

    def news(self, bound: float) -> list[str]:
        """What has come since the last call, in words."""
        said = []
        for found in self.differences[self._told[0] :]:
            more = "" if found.listed else " or more"
            above = "" if found.gap <= bound else ", at a cut" if found.at_cut else f", ABOVE {bound}"
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
            "compared": self.compared,
            "identical": self.compared - len(self.differences) - len(self.failures),
            "kinds": dict(self.kinds),
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


def stands_at_cut(request: Request, tokens: tuple[int, int], row: list, bound: float) -> bool:
    """Whether a change of the logits by ``bound`` could move one of ``tokens`` over an edge of the cut law.

    ``row`` is the reference's list of (log probability, token), most likely first, before the cuts.
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
        at_top_k = 0 < edge < len(values) and abs(values[rank] - values[edge]) < bound and rank >= edge - 1
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
    verdict.compared += 1
    verdict.kinds[request.kind[:3] if request.kind.startswith("law") else request.kind] += 1
    if request.abort_ms is not None and any("Aborted by AbortReq" in one.get("error", "") for one in ours):
        verdict.aborted += 1  # while its grammar was compiled
        return
    for one in ours:
        problem = form_of(request, one)
        if problem is not None:
            verdict.failures.append(f"{request.number}: {problem}; {request} {one}")
            return
        verdict.tokens += len(one["ids"])
        verdict.aborted += one["finish"]["type"] == "abort"
    if right is None:
        return
    if any("error" in one for one in right):
        verdict.failures.append(f"{request.number}: the reference failed: {right}; {request}")
        return
    for one, other in zip(ours, right, strict=True):
        if not _same(request, one, other, bound, verdict):
            return


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
    """Whether an answer is the right one; says so in ``verdict`` otherwise."""
    aborted = one["finish"]["type"] == "abort"
    expected = other["ids"]
    position = next((i for i, (a, b) in enumerate(zip(one["ids"], expected)) if a != b), None)
    if position is not None:
        # While its grammar is compiled SGLang ends a request by giving it another prompt, and answers that.
        if aborted and one["finish"].get("message") == "Aborted by AbortReq.":
            return True
        tokens = one["ids"][position], expected[position]
        gap, listed = gap_of(request, position, *tokens, other)
        found = Difference(request.number, request.kind, position, *tokens, gap, listed)
        if request.kind != "greedy" and position < len(other.get("tops", [])):
            found.at_cut = stands_at_cut(request, tokens, other["tops"][position], bound)
        verdict.differences.append(found)
        if not gap <= bound and not found.at_cut:
            verdict.wide.append(found)
            verdict.requests.append(f"{request} {one}")
    _compare_values(request, one, other, position, bound, verdict)
    if position is not None:
        return False
    if aborted and len(one["ids"]) <= len(expected):
        return True
    ends = [(len(a["ids"]), a["finish"], a["usage"], a["reasoning"], a["text"]) for a in (one, other)]
    if ends[0] != ends[1]:
        verdict.failures.append(f"{request.number}: ends differently: {ends[0]} and {ends[1]}; {request}")
        return False
    return True


def _compare_values(
    request: Request, one: Answer, other: Answer, position: int | None, bound: float, verdict: Verdict
) -> None:
    """Log probabilities up to the first difference, and of the prompt."""
    rows = [(one.get("logprobs", [])[:position], other.get("logprobs", []))]
    if request.fields.get("logprob_start_len") == 0:
        rows.append((one.get("input_logprobs", []), other.get("input_logprobs", [])))
    for found, right in rows:
        for value, expected in zip(found, right):
            if value is None or expected is None or expected < -80:  # masked to nothing
                continue
            apart = abs(value - expected)
            verdict.largest_value_difference = max(verdict.largest_value_difference, apart)
            if not apart <= bound:
                verdict.failures.append(f"{request.number}: log probability {value}, not {expected}; {request}")
                return


def same_law(ours: dict[str, list[list[int]]], right: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Two-sample chi-square tests, of every token and of every two neighbours, for each group of equal requests.

    Parameters
    ----------
    ours, right : dict
        Texts by group.

    Returns
    -------
    dict
        Texts a group, and the smallest p-value times the number of tests.
    """
    from scipy import stats

    values = []
    for group, texts in ours.items():
        length = min((len(text) for text in [*texts, *right.get(group, [])]), default=0)
        windows = [(i, i + 1) for i in range(length)] + [(i, j + 1) for i, j in pairwise(range(length))]
        for start, end in windows:
            counts: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
            for side, sample in enumerate((texts, right.get(group, []))):
                for text in sample:
                    counts[tuple(text[start:end])][side] += 1
            table = [row for row in counts.values() if sum(row) >= MIN_OBSERVED]
            rare = np.sum([row for row in counts.values() if sum(row) < MIN_OBSERVED] or [[0, 0]], axis=0)
            if rare.sum() >= MIN_OBSERVED:
                table.append(rare.tolist())
            if len(table) > 1 and np.all(np.sum(table, axis=0) > 0):
                values.append(float(stats.chi2_contingency(np.array(table).T).pvalue))
    return {
        "texts": {group: len(texts) for group, texts in sorted(ours.items())},
        "tests": len(values),
        "p_value": min(1.0, min(values) * len(values)) if values else None,
    }
