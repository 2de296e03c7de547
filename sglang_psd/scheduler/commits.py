"""From a finished forward to the rows that go to the drafter: which requests will certainly go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_psd.channel.messages import RoundRow, Sampling
from sglang_psd.target.requests import is_greedy, seed_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


# Attribute of a request that remembers its stop tokens: they are looked up every round.
_STOPS = "_psd_stop_tokens"


def sequence_len(req: Req) -> int:
    """Committed length: prompt and output."""
    return len(req.origin_input_ids) + len(req.output_ids)


def remaining_tokens(req: Req) -> int:
    """Tokens the request may still emit."""
    return req.sampling_params.max_new_tokens - len(req.output_ids)


def wire_sampling(req: Req, default_seed: int | None) -> Sampling:
    """The request's sampling parameters, as the drafter needs them."""
    params = req.sampling_params
    return Sampling(
        greedy=is_greedy(req),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed_of(req, default_seed),
    )


def may_end_with(req: Req, new_tokens: Sequence[int]) -> bool:
    """Whether the request may be over once ``new_tokens`` are committed.

    Looks at what is cheap to see: length and stop tokens. Stop strings show later; such a request is closed then.
    """
    if req.to_finish is not None or len(new_tokens) >= remaining_tokens(req):
        return True
    return not stop_tokens(req).isdisjoint(new_tokens)


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


def settled_len(req: Req, tokens: Sequence[int]) -> int:
    """How many of a chunk's accepted tokens the plain server would have generated before checking its stops.

    SGLang looks at ``max_new_tokens`` before it looks for stop tokens and stop strings inside a chunk, so a chunk that
    reaches the limit hides a stop in its middle. Cut after the first stop token; and where stop strings are wanted,
    leave the token that would reach the limit to the next round (its law does not depend on that).
    """
    stops = stop_tokens(req)
    length = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    params = req.sampling_params
    wants_text = bool(params.stop_strs or params.stop_regex_strs)
    if wants_text and length > 1 and length >= remaining_tokens(req):
        length = max(1, remaining_tokens(req) - 1)
    return length


def commit_row(req: Req, new_tokens: Sequence[int], *, counted: bool) -> RoundRow:
    """Row that reports ``new_tokens``; ``counted`` says whether ``output_ids`` holds them already."""
    base_len = sequence_len(req) + (0 if counted else len(new_tokens))
    return RoundRow(req.rid, base_len, list(new_tokens))
