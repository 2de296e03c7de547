"""Whatever concerns every request: abort, pause, flush, idle test, integrity, shut-down."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from sglang_psd.telemetry.stats import PSDStats

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler as _Base

    from sglang_psd.scheduler.drafts import DraftClient
else:
    _Base = object


class OversightMixin(_Base):
    """SGLang looks at one running batch; these overrides look at all slots and at what is in flight."""

    psd_client: DraftClient | None

    def _pp_microbatches_drained(self) -> bool:
        """Part of SGLang's idle test: with it, flush and pool checks wait for every slot."""
        if self.psd is None:
            return super()._pp_microbatches_drained()
        return all(slot.drained() for slot in self.psd_slots)

    def abort_request(self, recv_req: AbortReq):
        """SGLang aborts in the current slot; do the same in the others and in what is in flight."""
        super().abort_request(recv_req)
        if self.psd is None:
            return
        for req in {id(r): r for slot in self.psd_slots for r in slot.all_requests()}.values():
            if not req.finished() and (recv_req.abort_all or req.rid.startswith(recv_req.rid)):
                req.to_finish = FINISH_ABORT()

    def process_pending_chunked_abort(self) -> None:
        """The drafter forgets a request that ends between two parts of its prompt: it may be in no forward any more."""
        pending = self._pending_chunked_abort_req
        super().process_pending_chunked_abort()
        if pending is not None and pending.finished() and self.psd_client is not None:
            self.psd_client.close([pending.rid])

    def pause_generation(self, recv_req: PauseGenerationReqInput):
        """Retract from every slot, after the results in flight have been processed."""
        if self.psd is None or recv_req.mode == "in_place":
            return super().pause_generation(recv_req)
        for slot in self.psd_slots:
            self._psd_finish(slot)
            if slot.last is not None and self.chunked_req is not None:
                # SGLang retracts the prompt that is being read by itself: it must not meet it in a slot as well.
                slot.last.filter_batch(chunked_req_to_exclude=self.chunked_req)
        self._psd_write_down()  # the next launch may be long in coming
        for slot in self.psd_slots:
            self._psd_enter(slot)
            super().pause_generation(recv_req)
            slot.running, slot.last = self.running_batch, None

    def flush_cache(self, empty_cache: bool = True):
        """Forget what the slots launched last, as SGLang does with its one batch, and start the figures anew."""
        if self.psd is not None:
            # A request that is over leaves its slot at that slot's next turn: who has its answer may flush at once.
            self._psd_is_idle()
        done = super().flush_cache(empty_cache)
        if self.psd is not None and done:
            self.psd_stats = PSDStats()
            for slot in self.psd_slots:
                slot.last = None
        return done

    def psd_check_integrity(self) -> None:
        """Each request in one slot only, each request row held once, and SGLang's KV accounting over all of them.

        The drafter checks its own pools after each round (``DrafterSpec.integrity_checks``) and at every ping.

        Raises
        ------
        AssertionError
            The accounting is broken; the message says where.
        """
        owners: dict[int, int] = {}
        for slot in self.psd_slots:
            for req in slot.live_requests():
                assert owners.setdefault(id(req), slot.index) == slot.index, f"{req.rid} is in two slots"
        self._psd_check_rows()
        self.invariant_checker.self_check_during_busy()

    def _psd_everybody(self) -> list[Req]:
        """Requests that run, wait, are being read or are in flight; some more than once."""
        reading = [] if self.chunked_req is None else [self.chunked_req]
        return [req for slot in self.psd_slots for req in slot.all_requests()] + list(self.waiting_queue) + reading

    def _psd_check_rows(self) -> None:
        """Every row of the request table is free, or held by one request that somebody here still knows."""
        everybody = self._psd_everybody()
        holders = {id(req): req.req_pool_idx for req in everybody if req.req_pool_idx is not None}
        free, size = self.req_to_token_pool.free_slots, self.req_to_token_pool.size
        held = set(holders.values())
        assert len(held) == len(holders), f"requests share a row: {sorted(holders.values())}"
        assert held.isdisjoint(free), f"rows {sorted(held & set(free))} are held and free"
        # A streaming session keeps the row of its last request, and lends it to the next one.
        sessions = self.tree_cache.session_held_req_count(held)
        assert len(held) + len(free) + sessions == size, f"{len(held)} rows held, {len(free)} free, of {size}"

    def psd_shutdown(self) -> None:
        """Stop the drafter and close the trace."""
        self._psd_write_down()
        if self.psd_trace is not None:
            self.psd_trace.close()
        if self.psd_supervisor is not None:
            self.psd_supervisor.stop()
        if self.psd_process is not None:
            self.psd_process.stop()
