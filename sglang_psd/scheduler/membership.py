"""Who runs in which slot: admission, evening out, and retraction across slots."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_psd.scheduler import room
from sglang_psd.scheduler.rebalance import split_off
from sglang_psd.scheduler.slot import Slot, UnionView
from sglang_psd.scheduler.slots import admission_share, plan_move

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler as _Base
else:
    _Base = object

logger = logging.getLogger(__name__)


class AllPlacesDelayer:
    """SGLang's ``MinFreeSlotsDelayer`` over the places of all slots: one of them admits its share only.

    Parameters
    ----------
    stock : MinFreeSlotsDelayer
    scheduler : MembershipMixin
    """

    def __init__(self, stock: Any, scheduler: MembershipMixin):
        self._stock, self._scheduler = stock, scheduler

    def should_delay(self, *, running_bs: int, num_allocatable_reqs: int) -> bool:
        """As SGLang's."""
        running = UnionView(self._scheduler).batch_size()
        free = self._scheduler.max_running_requests - running
        return bool(self._stock.should_delay(running_bs=running, num_allocatable_reqs=free))


class MembershipMixin(_Base):
    """Overrides of SGLang's admission and memory steps, and the moves between slots."""

    def _psd_even_out(self, slot: Slot) -> None:
        """Move requests from ``slot`` to the other one when their sizes have drifted apart."""
        sizes = [len(s.live_requests()) for s in self.psd_slots]
        move = plan_move(sizes, self.psd.min_parallel_requests, self.psd.rebalance_threshold)
        if move is None or move.source != slot.index:
            return
        target = self.psd_slots[move.target]
        slot.running.filter_batch()
        moved = split_off(slot.running, move.count)
        if moved is None:
            return
        if target.running.is_empty():
            target.running = moved
        else:
            target.running.merge_batch(moved)
        self.psd_stats.moves += len(moved.reqs)

    def get_num_allocatable_reqs(self, running_bs: int) -> int:
        """Admit into the planning slot only up to its fair share."""
        allowed = super().get_num_allocatable_reqs(running_bs)
        slot = self._psd_planning
        if slot is None:
            return allowed
        sizes = [running_bs if s is slot else len(s.live_requests()) for s in self.psd_slots]
        share = admission_share(sizes, slot.index, len(self.waiting_queue))
        return min(allowed, self.max_running_requests - sum(sizes), share)

    def _get_new_batch_prefill_raw(self, *args, **kwargs):
        """Requests pushed out for one that finds no room after all return to the queue; SGLang forgets them there."""
        if self.psd is None:
            return super()._get_new_batch_prefill_raw(*args, **kwargs)
        room.forget_adder()
        batch, running = super()._get_new_batch_prefill_raw(*args, **kwargs)
        if batch is None:
            for req in room.pushed_out():
                self._add_request_to_queue(req)
        return batch, running

    def _psd_cut(self, slot: Slot) -> int | None:
        """How many requests ``slot`` may admit where others are left to the next slot; None where all fit here."""
        sizes = [len(s.live_requests()) for s in self.psd_slots]
        share = admission_share(sizes, slot.index, len(self.waiting_queue))
        wanted = min(len(self.waiting_queue), self.max_running_requests - sum(sizes))
        return share if share < wanted else None

    def update_running_batch(self, batch: ScheduleBatch):
        """Before SGLang retracts within one slot, let the other one give way."""
        slot = self._psd_planning
        if slot is not None and len(self.psd_slots) > 1:
            other = self.psd_slots[1 - slot.index]
            batch.filter_batch()
            retracted = room.make_room(
                batch,
                lambda: other.running,
                lambda: self._psd_drain(other, back_to=slot),
                self._psd_retract,
                self.server_args,
            )
            if retracted:
                # As SGLang after a retraction: fewer are admitted for a while.
                tracker = self.new_token_ratio_tracker
                tracker.current = tracker.estimate_new_token_ratio_after_retract([*batch.reqs, *other.running.reqs])
        return super().update_running_batch(batch)

    def _psd_drain(self, other: Slot, back_to: Slot) -> None:
        """Process what ``other`` has in flight; all that holds memory there runs then and may be retracted."""
        self._psd_finish(other)
        other.running.filter_batch()
        self._psd_let_run(other)
        self._psd_enter(back_to)

    def _psd_let_run(self, slot: Slot) -> None:
        """Move prompts that have been read to the running batch, as SGLang does at the slot's next turn."""
        last = slot.last
        if last is None or not last.forward_mode.is_extend():
            return
        slot.last = None
        reading = [req for req in (self.chunked_req, last.chunked_req) if req is not None]
        last.filter_batch(chunked_req_to_exclude=reading)
        if last.is_empty():
            return
        if slot.running.is_empty():
            slot.running = last
        else:
            slot.running.merge_batch(last)

    def _psd_retract(self, running: ScheduleBatch, req: Req) -> None:
        index = next(i for i, candidate in enumerate(running.reqs) if candidate is req)
        running.release_req(index, len(running.reqs) - 1, self.server_args)
        running.filter_batch(keep_indices=[i for i in range(len(running.reqs)) if i != index])
        self._psd_count_retraction(req)
        logger.warning("PSD: KV pool is full; retracted request %s.", req.rid)
        self._add_request_to_queue(req, is_retracted=True)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False):
        """A request that returns to the queue leaves the drafter; admission opens it again. Bad ones end here."""
        if self.psd is not None:
            self._psd_refuse(req)
        if self.psd is not None and (is_retracted or req.is_retracted):
            self._psd_preempted.append(req.rid)
            if self.psd_client is not None:
                self.psd_client.close([req.rid])
        return super()._add_request_to_queue(req, is_retracted)
