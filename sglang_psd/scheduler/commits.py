"""Requests and their new tokens as the drafter is told of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sglang_psd.channel.messages import RoundRow, Sampling
from sglang_psd.scheduler.stops import may_end_with
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


def certain_rows(
    reqs: Sequence[Req], tokens: Sequence[list[int]], is_open: Callable[[str], bool], *, may_stop: bool
) -> list[RoundRow]:
    """Rows of those requests that certainly go on after the tokens they gain; ``output_ids`` does not hold them yet.

    The drafter waits for this message: ``may_stop`` false says that no token ends anything, and none is looked at.
    """
    rows = []
    for req, gained in zip(reqs, tokens):
        made, count = len(req.output_ids), len(gained)
        goes_on = count and req.finished_reason is None and req.to_finish is None
        if not goes_on or made + count >= req.sampling_params.max_new_tokens or not is_open(req.rid):
            continue
        if not may_stop or not may_end_with(req, gained):
            rows.append(RoundRow(req.rid, len(req.origin_input_ids) + made + count, gained))
    return rows
