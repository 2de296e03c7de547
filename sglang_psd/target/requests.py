"""What a request's sampling parameters mean for a chunk: plain questions about SGLang's ``Req``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_psd.target.processors import can_be_followed

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

LIMIT = 1 << 63


def needs_plain_step(req: Req) -> bool:
    """Whether a request's law at later positions can only be had by going there.

    Custom logit processors that remember their calls. Such a request takes part in every round without drafts: one
    exact token per round.
    """
    return bool(req.custom_logit_processor) and not can_be_followed(req)


def has_penalties(req: Req) -> bool:
    """Whether the request's law depends on what it has generated."""
    params = req.sampling_params
    return bool(
        params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0 or params.min_new_tokens
    )


def is_greedy(req: Req) -> bool:
    """SGLang normalises temperature 0 to ``top_k == 1``."""
    return req.sampling_params.top_k <= 1


def default_seed(server_args) -> int | None:
    """Seed of requests that bring none: 42 under ``--enable-deterministic-inference``, as in SGLang."""
    return 42 if server_args.enable_deterministic_inference else None


def seed_of(req: Req, default: int | None) -> int | None:
    """Seed of a request, or ``default`` (see ``default_seed``) where it brings none."""
    seed = req.sampling_params.sampling_seed
    if seed is None:
        return default
    # Any whole number comes in over HTTP; tensors and messages hold 64 bits.
    return seed if -LIMIT <= seed < LIMIT else seed % LIMIT


def min_length_stops(req: Req) -> set[int]:
    """Tokens that ``min_new_tokens`` forbids (``penaltylib/min_new_tokens.py``)."""
    stops = set(req.sampling_params.stop_token_ids or ())
    if req.tokenizer is not None:
        stops |= set(req.tokenizer.additional_stop_token_ids or ())
        if req.tokenizer.eos_token_id is not None:
            stops.add(req.tokenizer.eos_token_id)
    return stops


def drop_stock_penalties(batch: ScheduleBatch) -> None:
    """Keep SGLang from applying penalties of its own: ``target/penalties.py`` applies them at every position."""
    info = batch.sampling_info
    if info is not None and info.penalizer_orchestrator.is_required:
        info.penalizer_orchestrator.release()
        info.penalizer_orchestrator.is_required = False
