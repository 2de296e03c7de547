"""Where the plain server would have stopped inside a chunk.

SGLang looks at ``max_new_tokens`` before it looks for stops inside a chunk, and at patterns (``stop_regex``) only at
the chunk's end. A chunk is therefore cut before SGLang sees it: after the first token with which a request without
speculation would have ended. Nothing behind the end ever reaches output, usage or log probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# Attribute of a request that remembers its stop tokens: they are looked up every round.
_STOPS = "_psd_stop_tokens"


def remaining_tokens(req: Req) -> int:
    """Tokens the request may still emit."""
    return req.sampling_params.max_new_tokens - len(req.output_ids)


def wants_text(req: Req) -> bool:
    """Whether the request can end with a stop string or pattern."""
    return bool(req.sampling_params.stop_strs or req.sampling_params.stop_regex_strs)


def stop_tokens(req: Req) -> set[int]:
    """Token ids that end the request (``Req._check_token_based_finish`` in ``schedule_batch.py``)."""
    known = getattr(req, _STOPS, None)
    if known is not None:
        return known
    params = req.sampling_params
    if params.ignore_eos:
        return set()
    stops = set(params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        stops.add(req.tokenizer.eos_token_id)
        stops.update(getattr(req.tokenizer, "additional_stop_token_ids", None) or ())
    setattr(req, _STOPS, stops)
    return stops


@dataclass(frozen=True)
class ChunkEnds:
    """What the chunks of a batch may end with besides their length; known before they are there.

    Most chunks hold no token that ends anything: one look at all tokens of the batch then replaces one at each request.

    Attributes
    ----------
    stops : frozenset of int
        Stop tokens of all requests together.
    others : bool
        Whether a request has a grammar, stop strings or patterns, or a custom logit processor, which may fail.
    """

    stops: frozenset[int]
    others: bool

    @classmethod
    def of(cls, reqs: Sequence[Req]) -> ChunkEnds:
        """Those of the given requests."""
        others = any(req.grammar is not None or wants_text(req) or req.custom_logit_processor for req in reqs)
        return cls(frozenset().union(*map(stop_tokens, reqs)), others)

    def possible(self, tokens: Sequence[int]) -> bool:
        """Whether a chunk made of any of ``tokens`` may end before its last one."""
        return self.others or not self.stops.isdisjoint(tokens)


def may_end_with(req: Req, new_tokens: Sequence[int]) -> bool:
    """Whether the request may be over once ``new_tokens``, a chunk that is cut, are committed."""
    if req.to_finish is not None or len(new_tokens) >= remaining_tokens(req):
        return True
    if req.grammar is not None and req.grammar.is_terminated():
        return True
    # Stop strings that only the whole text shows are found in the book-keeping; such a request is closed then.
    return not stop_tokens(req).isdisjoint(new_tokens)


def settled_len(req: Req, tokens: Sequence[int]) -> int:
    """How many of a chunk's accepted tokens count, looking at stop tokens and at the limit.

    Where stop strings are wanted, the token that would reach the limit is left to the next round, as a chunk of its
    own: SGLang then decides between string and limit as it does without speculation. Whether it is left depends on how
    many tokens there are, never on which, so the law stays what it is.
    """
    stops = stop_tokens(req)
    length = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    if wants_text(req) and length > 1 and length >= remaining_tokens(req):
        length = max(1, remaining_tokens(req) - 1)
    return length


def end_of_text(req: Req, tokens: Sequence[int], least: int = 2) -> int:
    """How many of ``tokens`` count, looking at stop strings and patterns; marks the request as ending there.

    Fewer than ``least`` are left to SGLang's book-keeping.

    SGLang's own check runs after every token, as it does without speculation: a pattern may match only where the text
    ends (``a$``), and a later token must not take that back.
    """
    if len(tokens) < least or not wants_text(req) or req.finished():
        return len(tokens)
    before = len(req.output_ids)
    try:
        for i, token in enumerate(tokens):
            req.output_ids.append(token)
            req._check_str_based_finish(1)
            if req.finished_reason is not None:
                # An abort that came in meanwhile stays one.
                req.to_finish = req.to_finish or req.finished_reason
                return i + 1
    finally:
        del req.output_ids[before:]
        req.finished_reason, req.finished_len = None, None
    return len(tokens)
