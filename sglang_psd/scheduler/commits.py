"""Requests and their new tokens as the drafter is told of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_psd.channel.messages import RoundRow, Sampling
from sglang_psd.scheduler.stops import may_end_with, remaining_tokens
from sglang_psd.target.requests import is_greedy, seed_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def sequence_len(req: Req) -> int:
    """Committed length: prompt and output."""
    return len(req.origin_input_ids) + len(req.output_ids)


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


def commit_row(req: Req, new_tokens: Sequence[int], *, counted: bool) -> RoundRow:
    """Row that reports ``new_tokens``; ``counted`` says whether ``output_ids`` holds them already."""
    base_len = sequence_len(req) + (0 if counted else len(new_tokens))
    return RoundRow(req.rid, base_len, list(new_tokens))


@dataclass(frozen=True)
class Prospect:
    """What is known about a request while its tokens are still being computed.

    Attributes
    ----------
    req : Req
    length : int
        Committed length.
    room : int
        Tokens that it may still emit.
    """

    req: Req
    length: int
    room: int

    @classmethod
    def of(cls, reqs: Sequence[Req], is_open: Callable[[str], bool]) -> list[Prospect | None]:
        """Those of a batch; None for a request that the drafter does not know."""
        return [cls(req, sequence_len(req), remaining_tokens(req)) if is_open(req.rid) else None for req in reqs]


def certain_rows(
    prospects: Sequence[Prospect | None], tokens: Sequence[list[int]], *, may_stop: bool
) -> list[RoundRow]:
    """Rows of those requests that certainly go on after the tokens they gain; ``output_ids`` does not hold them yet.

    The drafter waits for this message: ``may_stop`` false says that no token ends anything, and none is looked at.
    """
    rows = []
    for known, gained in zip(prospects, tokens):
        count = len(gained)
        if known is None or not 0 < count < known.room:
            continue
        req = known.req
        if req.finished_reason is not None or req.to_finish is not None:
            continue
        if not may_stop or not may_end_with(req, gained):
            rows.append(RoundRow(req.rid, known.length + count, gained))
    return rows
