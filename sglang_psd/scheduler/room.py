"""KV memory shared by slots: what one slot must know of the others.

SGLang estimates and retracts within one batch. With two, admission has to count the other slot's future tokens, and a
slot that runs out of memory has to be able to retract from the other one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


@dataclass
class Elsewhere:
    """What the slot that plans has to know of the other one; read by the hook on ``PrefillAdder``.

    Attributes
    ----------
    reqs : list of Req
        Requests that run there.
    cut : int or None
        How many requests this slot may admit before the rest is left to that one; None: as many as fit.
    adder : PrefillAdder or None
        What admits requests in the plan that is being made.
    planning : bool
        Whether a PSD scheduler plans in this process; other servers are left alone.
    """

    reqs: list[Req] = field(default_factory=list)
    cut: int | None = None
    adder: Any = None
    planning: bool = False


_elsewhere = Elsewhere()


def set_elsewhere(reqs: Sequence[Req], cut: int | None = None) -> None:
    """Tell the admission estimate which requests run in other slots, and how many more may run there."""
    _elsewhere.reqs, _elsewhere.cut, _elsewhere.planning = list(reqs), cut, True


def count_elsewhere(adder) -> None:
    """Make a fresh ``PrefillAdder`` (``schedule_policy.py``) see the other slots: their future tokens, their ranks."""
    _elsewhere.adder = adder
    adder.rem_total_token_offset += sum(adder._get_running_request_total_token_offset(req) for req in _elsewhere.reqs)
    if _elsewhere.planning:
        others, cut = _elsewhere.reqs, _elsewhere.cut
        preempt = adder.preempt_to_schedule
        adder.preempt_to_schedule = lambda req, server_args: (
            preempts_here(adder, others, cut, server_args) and preempt(req, server_args)
        )
    if _elsewhere.reqs:
        adder.add_one_req_ignore_eos = functools.partial(_admit_among_all, adder, adder.add_one_req_ignore_eos, others)


def _admit_among_all(adder, admit: Callable[[Req], Any], others: Sequence[Req], req: Req) -> Any:
    """SGLang's forecast for requests of known length takes the pool for its batch's own: show it all that run."""
    own = adder.running_batch
    adder.running_batch = SimpleNamespace(reqs=[*own.reqs, *others], batch_size=own.batch_size)
    try:
        return admit(req)
    finally:
        adder.running_batch = own


def forget_adder() -> None:
    """A plan begins; it may end before anything is admitted."""
    _elsewhere.adder = None


def pushed_out() -> list[Req]:
    """Requests that gave way to one of higher priority in this plan."""
    return [] if _elsewhere.adder is None else list(_elsewhere.adder.preempt_list)


def preempts_here(adder, others: Sequence[Req], cut: int | None, server_args) -> bool:
    """Whether a request of higher priority may push one out of the planning slot.

    Not where it will be admitted by the other slot, and not where that slot runs what SGLang would push out first. Nor
    where it needs a row of the request table that what gives way may keep, as a turn of a streaming session does.
    """
    if cut is not None and len(adder.can_run_list) >= cut:
        return False
    running = adder.running_batch
    keeps_row = any(req.session is not None and req.session.streaming for req in running.reqs)
    if keeps_row and running.req_to_token_pool.available_size() <= len(adder.can_run_list):
        return False
    sign = 1 if server_args.schedule_low_priority_values_first else -1

    def rank(req: Req) -> tuple[float, float]:
        return -sign * req.priority, -req.time_stats.wait_queue_entry_time

    own = [rank(req) for req in running.reqs if req not in adder.preempt_list and not req.finished()]
    return bool(own) and all(min(own) <= rank(req) for req in others)


def pick_victim(own: ScheduleBatch, other: ScheduleBatch, server_args) -> Req | None:
    """The request SGLang would retract first if both slots were one batch.

    None where there is nobody to choose from: SGLang's own code, which sees ``own`` alone, does what is left to do.
    """
    if other.is_empty():
        return None
    union = [*own.reqs, *other.reqs]
    order = own._get_decode_retraction_order(union, server_args)
    victim = union[order[-1]]
    if len(own.reqs) > 1 or victim is not own.reqs[0]:
        return victim
    # The last request of its slot is worth no less than the others: take the least preferred elsewhere.
    return union[order[-2]]


def make_room(
    own: ScheduleBatch,
    other: Callable[[], ScheduleBatch],
    drain: Callable[[], None],
    retract: Callable[[ScheduleBatch, Req], None],
    server_args,
) -> bool:
    """Free KV for ``own``'s next decode out of both slots while the other one holds any.

    SGLang's own retraction stays within ``own`` and ends the last request there when that is not enough.

    Parameters
    ----------
    own : ScheduleBatch
        Filtered running batch that is about to decode.
    other : callable
        Returns the other slot's running batch.
    drain : callable
        Processes what the other slot has in flight; called before anything is taken from it.
    retract : callable
        Retracts one request of a batch and queues it again.

    Returns
    -------
    bool
        Whether anything was retracted.
    """
    if own.is_empty() or own.check_decode_mem():
        return False
    drain()
    retracted = False
    while not own.check_decode_mem():
        victim = pick_victim(own, other(), server_args)
        if victim is None:
            break
        retract(own if any(victim is req for req in own.reqs) else other(), victim)
        retracted = True
    return retracted
