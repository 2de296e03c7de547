"""KV memory shared by slots: what one slot must know of the others.

SGLang estimates and retracts within one batch. With two, admission has to count the other slot's future tokens, and a
slot that runs out of memory has to be able to retract from the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

# Requests of the other slots while one slot plans; read by the hook on PrefillAdder.
_elsewhere: list[Req] = []


def set_elsewhere(reqs: Sequence[Req]) -> None:
    """Tell the admission estimate which requests run in other slots."""
    _elsewhere[:] = reqs


def count_elsewhere(adder) -> None:
    """Add the other slots' future tokens to a fresh ``PrefillAdder`` (``schedule_policy.py``)."""
    adder.rem_total_token_offset += sum(adder._get_running_request_total_token_offset(req) for req in _elsewhere)


def pick_victim(own: ScheduleBatch, other: ScheduleBatch, server_args) -> Req | None:
    """The request SGLang would retract first if both slots were one batch.

    Returns None when it sits in ``own`` and ``own`` can spare it: SGLang's own code retracts it then.
    """
    union = [*own.reqs, *other.reqs]
    order = own._get_decode_retraction_order(union, server_args)
    victim = union[order[-1]]
    in_own = any(victim is req for req in own.reqs)
    if not in_own:
        return victim
    if len(own.reqs) > 1:
        return None
    # The last request of its slot is worth no less than the others: take the least preferred elsewhere.
    return next((union[i] for i in reversed(order) if union[i] is not victim), None)


def make_room(
    own: ScheduleBatch,
    other: Callable[[], ScheduleBatch],
    drain: Callable[[], None],
    retract: Callable[[Req], None],
    server_args,
) -> None:
    """Free KV for ``own``'s next decode out of the other slot, if it cannot help itself.

    Parameters
    ----------
    own : ScheduleBatch
        Filtered running batch that is about to decode.
    other : callable
        Returns the other slot's running batch.
    drain : callable
        Processes what the other slot has in flight; called before anything is taken from it.
    retract : callable
        Retracts one request of the other slot and queues it again.
    """
    if own.is_empty() or own.check_decode_mem():
        return
    drain()
    while not own.check_decode_mem() and not other().is_empty():
        victim = pick_victim(own, other(), server_args)
        if victim is None:
            return
        retract(victim)
