"""SGLang's scheduler with two slots that take turns.

One turn of a slot: receive requests, plan the slot's batch (prefill first, as SGLang does), take its drafts, launch
it, then finish whatever else is in flight: wait for its tokens, send them to the drafter *at once*, and only then do
the book-keeping. Because a slot's tokens are on the host before its next launch, sequence lengths are exact.

The synchronous twin of the loop finishes a forward right after its launch. It is the oracle of the overlapped one, and
the better order where a launch blocks (CPU).

The precedent for several running batches is SGLang's ``scheduler_pp_mixin.py``. Everything that looks at "the" running
batch (abort, retract, idle check, load report, pause) is overridden here to see all slots.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.utils import DynamicGradMode, broadcast_pyobj

from sglang_psd.config import ALGORITHM, PSDConfig
from sglang_psd.scheduler import room
from sglang_psd.scheduler.commits import commit_row, may_end_with, remaining_tokens, sequence_len, settled_len, wire_sampling
from sglang_psd.scheduler.drafts import DraftAnswer, DraftClient, Taken
from sglang_psd.scheduler.launch import launch_drafter, visible_drafter_device
from sglang_psd.scheduler.rebalance import split_off
from sglang_psd.scheduler.slot import EmptyView, InFlight, Slot, UnionView
from sglang_psd.scheduler.slots import admission_share, next_turn, plan_move
from sglang_psd.scheduler.timing import ForwardTimer
from sglang_psd.target.worker import needs_plain_step
from sglang_psd.telemetry.stats import PSDStats, RoundRecord
from sglang_psd.telemetry.trace import TraceWriter

if TYPE_CHECKING:
    from sglang_psd.drafter.process import DrafterProcess

logger = logging.getLogger(__name__)


class PSDSchedulerMixin:
    """Overrides for ``sglang.srt.managers.scheduler.Scheduler``; inert unless the algorithm is PSD."""

    psd: PSDConfig | None = None
    psd_slots: list[Slot]
    psd_client: DraftClient | None = None
    psd_process: DrafterProcess | None = None

    # --- start ----------------------------------------------------------------------------------

    def init_model_worker(self) -> None:
        """Spawn the drafter, load the target, join the drafter: both load side by side."""
        if not _uses_psd(self.server_args):
            return super().init_model_worker()
        self.psd = self.server_args.psd()
        self.psd_stats = PSDStats()
        self.psd_turn = 0
        self._psd_preempted: list[str] = []
        self._psd_planning: Slot | None = None
        owner = self.ps.tp_rank == 0
        if owner:
            device = visible_drafter_device(self.server_args, self.psd, self.ps.gpu_id)
            self.psd_process = launch_drafter(self.server_args, self.psd, device)
            if device.shared:
                self.psd_process.join(self.psd.start_timeout_s)
        super().init_model_worker()
        if owner:
            hello = self.psd_process.join(self.psd.start_timeout_s)
            self.psd_client = DraftClient(
                self.psd_process,
                self.server_args.speculative_num_steps,
                self.psd.draft_timeout_s,
                self._psd_on_answer,
            )
            self.psd_drafter_context = hello.context_len
        self.psd_trace = TraceWriter(self.psd.trace) if owner and self.psd.trace else None
        self.psd_timer = ForwardTimer(self.device)
        logger.info(
            "PSD is on: mode %s, %d drafts a round, %s loop.",
            self.psd.mode,
            self.server_args.speculative_num_steps,
            "synchronous" if self._psd_synchronous else "overlapped",
        )

    @property
    def _psd_synchronous(self) -> bool:
        loop = self.psd.loop
        # A launch on the CPU returns when the forward is done: there is nothing to hide book-keeping behind.
        return loop == "synchronous" or (loop == "auto" and self.device == "cpu")

    def init_pool_stats_observer(self) -> None:
        """Let SGLang's observers see all slots."""
        super().init_pool_stats_observer()
        self._psd_widen(self.pool_stats_observer, last=True)

    def init_invariant_checker(self) -> None:
        """Let SGLang's memory check see all slots."""
        super().init_invariant_checker()
        self._psd_widen(self.invariant_checker, last=True)

    def init_load_inquirer(self) -> None:
        """Let ``/v1/loads`` count all slots."""
        super().init_load_inquirer()
        self._psd_widen(self.load_inquirer, last=False)

    def _psd_widen(self, observer: Any, *, last: bool) -> None:
        if self.psd is None:
            return
        union, empty = UnionView(self), EmptyView()
        # The observers are frozen dataclasses that take these callables from their constructor.
        object.__setattr__(observer, "get_running_batch", lambda: union)
        if last:
            object.__setattr__(observer, "get_last_batch", lambda: empty)

    # --- the loop -------------------------------------------------------------------------------

    @DynamicGradMode()
    def event_loop_psd(self) -> None:
        """Serve until shut down."""
        self.psd_init_slots()
        while not self.gracefully_exit:
            self.process_input_requests(self.request_receiver.recv_requests())
            if self._engine_paused:
                continue
            self.psd_turn_of(self.psd_slots[self.psd_turn])
            self.psd_turn = next_turn(self.psd_turn, len(self.psd_slots))
        self.psd_shutdown()

    def psd_init_slots(self) -> None:
        """Create the slots around the scheduler's initial empty batch."""
        self.psd_slots = [
            Slot(index, ScheduleBatch(reqs=[], batch_is_full=False)) for index in range(self.psd.num_slots)
        ]
        self.running_batch, self.last_batch = self.psd_slots[0].running, None

    def psd_turn_of(self, slot: Slot) -> None:
        """One turn: plan, launch, finish the others."""
        self._psd_finish(slot)
        self._psd_even_out(slot)
        batch = self._psd_plan(slot)
        if batch is not None:
            self._psd_launch(slot, batch)
        else:
            slot.last = None
        for other in self.psd_slots:
            if other is not slot or self._psd_synchronous:
                self._psd_finish(other)
        self._psd_enter(slot)
        if all(s.drained() for s in self.psd_slots):
            self._psd_rest()
        if envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get() or self.psd.integrity_checks:
            self.psd_check_integrity()

    def _psd_enter(self, slot: Slot) -> None:
        """Make ``slot`` what SGLang's own methods see."""
        self.running_batch, self.last_batch = slot.running, slot.last

    def _psd_plan(self, slot: Slot) -> ScheduleBatch | None:
        self._psd_enter(slot)
        self._psd_planning = slot
        slot.running.batch_is_full = False
        room.set_elsewhere([r for s in self.psd_slots if s is not slot for r in s.live_requests()])
        try:
            plan = self.get_next_batch_to_run(running_batch=slot.running, last_batch=slot.last)
        finally:
            self._psd_planning = None
        slot.running = plan.running_batch
        self.running_batch = slot.running
        self.cur_batch_for_debug = plan.batch_to_run
        return plan.batch_to_run

    def _psd_launch(self, slot: Slot, batch: ScheduleBatch) -> None:
        sizes = tuple(len(s.live_requests()) for s in self.psd_slots)
        taken = None
        if batch.forward_mode.is_extend():
            self._psd_open(batch.reqs)
        else:
            taken = self._psd_take(batch.reqs)
            self.draft_worker.stage(taken.rows)
        launch_s = time.monotonic()
        timer = self.psd_timer.start()
        result = self.run_batch(batch)
        self.psd_timer.stop(timer)
        slot.in_flight = InFlight(batch.copy(), result, launch_s, taken, sizes, timer)
        slot.last = batch

    def _psd_finish(self, slot: Slot) -> None:
        """Process what ``slot`` has in flight, if anything: commit first, book-keep after."""
        flight = slot.in_flight
        if flight is None:
            return
        slot.in_flight = None
        self._psd_enter(slot)
        self.psd_timer.wait(flight.timer)
        if flight.result.copy_done is not None:
            flight.result.copy_done.synchronize()
        result_s = time.monotonic()
        self._psd_settle(flight)
        before = {req.rid: len(req.output_ids) for req in flight.batch.reqs}
        commit_s = self._psd_commit_early(flight)
        self.process_batch_result(flight.batch, flight.result)
        self._psd_commit_rest(flight, before)
        if flight.taken is not None:
            self._psd_refresh_lengths(slot.running)
        self._psd_record(slot, flight, result_s, commit_s)

    def _psd_rest(self) -> None:
        self.psd_stats.pause()
        if self.psd_trace is not None:
            self.psd_trace.flush()
        if self.psd_client is not None and self.psd_client.open_requests and not self.waiting_queue:
            if self.chunked_req is None:
                self.psd_client.close_all()
        self.on_idle()

    def _psd_refresh_lengths(self, running: ScheduleBatch) -> None:
        """Lengths after a verify come from the host: exact, and no readback."""
        if running.is_empty():
            return
        import torch

        lengths = torch.tensor([req.kv_committed_len for req in running.reqs], dtype=torch.int64)
        running.seq_lens_cpu = lengths
        pinned = lengths if self.device == "cpu" else lengths.pin_memory()
        running.seq_lens = pinned.to(running.device, non_blocking=True)
        running.seq_lens_sum = int(lengths.sum())
        running.orig_seq_lens = running.seq_lens.to(running.orig_seq_lens.dtype)

    # --- slots ----------------------------------------------------------------------------------

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
        slot = self._psd_planning if self.psd is not None else None
        if slot is None:
            return allowed
        sizes = [running_bs if s is slot else len(s.live_requests()) for s in self.psd_slots]
        share = admission_share(sizes, slot.index, len(self.waiting_queue))
        return min(allowed, self.max_running_requests - sum(sizes), share)

    def update_running_batch(self, batch: ScheduleBatch):
        """Before SGLang retracts within one slot, let the other one give way."""
        slot = self._psd_planning if self.psd is not None else None
        if slot is not None and len(self.psd_slots) > 1:
            other = self.psd_slots[1 - slot.index]
            batch.filter_batch()
            room.make_room(
                batch,
                lambda: other.running,
                lambda: self._psd_drain(other, back_to=slot),
                lambda req: self._psd_retract(other, req),
                self.server_args,
            )
        return super().update_running_batch(batch)

    def _psd_drain(self, other: Slot, back_to: Slot) -> None:
        self._psd_finish(other)
        other.running.filter_batch()
        self._psd_enter(back_to)

    def _psd_retract(self, slot: Slot, req: Req) -> None:
        running = slot.running
        index = next(i for i, candidate in enumerate(running.reqs) if candidate is req)
        running.release_req(index, len(running.reqs) - 1, self.server_args)
        running.filter_batch(keep_indices=[i for i in range(len(running.reqs)) if i != index])
        running.batch_is_full = False
        self.metrics_reporter.num_retracted_reqs += 1
        logger.warning("PSD: KV pool is full; retracted request %s of slot %d.", req.rid, slot.index)
        self._add_request_to_queue(req, is_retracted=True)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False):
        """A request that returns to the queue leaves the drafter; admission opens it again."""
        if self.psd is not None and (is_retracted or req.is_retracted):
            self._psd_preempted.append(req.rid)
            if self.psd_client is not None:
                self.psd_client.close([req.rid])
        return super()._add_request_to_queue(req, is_retracted)

    # --- drafts ---------------------------------------------------------------------------------

    def _psd_open(self, reqs: list[Req]) -> None:
        """Hand requests to the drafter at admission: it reads the prompt while the target does."""
        client = self.psd_client
        if client is None or not client.usable:
            return
        for req in reqs:
            if client.is_open(req.rid) or needs_plain_step(req) or req.finished() or req.to_finish is not None:
                continue
            if req.input_embeds is not None or req.multimodal_inputs is not None or remaining_tokens(req) < 2:
                continue
            if sequence_len(req) < self.psd_drafter_context:
                client.open(req.rid, [*req.origin_input_ids, *req.output_ids], wire_sampling(req))

    def _psd_take(self, reqs: list[Req]) -> Taken:
        """Drafts for the next verify; rank 0 shares what it has."""
        taken = None
        if self.psd_client is not None:
            wanted = [
                (req.rid, sequence_len(req), remaining_tokens(req) - 1) if self.psd_client.is_open(req.rid) else None
                for req in reqs
            ]
            taken = self.psd_client.take(wanted)
        if self.ps.tp_size > 1:
            shared = broadcast_pyobj(
                [taken], self.tp_group.rank, self.tp_cpu_group, src=self.tp_group.ranks[0]
            )
            taken = shared[0]
        return taken if taken is not None else Taken(rows=[None] * len(reqs))

    def _psd_commit_early(self, flight: InFlight) -> float:
        """Send the tokens of requests that will certainly go on; the drafter starts while we book-keep."""
        client = self.psd_client
        if client is None or not client.usable:
            return time.monotonic()
        rows = []
        for req, tokens in zip(flight.batch.reqs, self._psd_new_tokens(flight)):
            if tokens and client.is_open(req.rid) and not req.finished() and not may_end_with(req, tokens):
                rows.append(commit_row(req, tokens, counted=False))
                flight.committed.add(req.rid)
        return client.commit(rows)

    def _psd_commit_rest(self, flight: InFlight, before: dict[str, int]) -> None:
        """Close what has ended; commit what looked like ending and did not."""
        client = self.psd_client
        if client is None:
            return
        client.close([req.rid for req in flight.batch.reqs if req.finished()])
        rows = [
            commit_row(req, req.output_ids[before[req.rid] :], counted=True)
            for req in flight.batch.reqs
            if not req.finished()
            and req.rid not in flight.committed
            and client.is_open(req.rid)
            and len(req.output_ids) > before[req.rid]
        ]
        client.commit(rows)

    def _psd_settle(self, flight: InFlight) -> None:
        """Cut accepted runs where the plain server would have stopped."""
        if flight.taken is None:
            return
        lengths = flight.result.accept_lens
        for i, (req, tokens) in enumerate(zip(flight.batch.reqs, self._psd_new_tokens(flight))):
            if len(tokens) > 1:
                lengths[i] = settled_len(req, tokens)

    def _psd_new_tokens(self, flight: InFlight) -> list[list[int]]:
        """Tokens each request of a finished forward gains, before SGLang's book-keeping."""
        result, batch = flight.result, flight.batch
        ids = result.next_token_ids.tolist()
        if flight.taken is None:
            return [[] if req.inflight_middle_chunks > 0 else [token] for req, token in zip(batch.reqs, ids)]
        stride = result.speculative_num_draft_tokens
        lengths = result.accept_lens.tolist()
        return [ids[i * stride : i * stride + length] for i, length in enumerate(lengths)]

    def _psd_on_answer(self, answer: DraftAnswer) -> None:
        self.psd_stats.add_draft(answer.sent_s, answer.started_s, answer.finished_s)
        if self.psd_trace is not None:
            span = (answer.started_s, answer.finished_s)
            self.psd_trace.write_draft(answer.round_id, answer.rids, answer.sent_s, answer.received_s, span)

    # --- all slots at once ----------------------------------------------------------------------

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

    def pause_generation(self, recv_req: PauseGenerationReqInput):
        """Retract from every slot, after the results in flight have been processed."""
        if self.psd is None or recv_req.mode == "in_place":
            return super().pause_generation(recv_req)
        for slot in self.psd_slots:
            self._psd_finish(slot)
        for slot in self.psd_slots:
            self._psd_enter(slot)
            super().pause_generation(recv_req)
            slot.running, slot.last = self.running_batch, None

    def flush_cache(self, empty_cache: bool = True):
        """Forget what the slots launched last, as SGLang does with its one batch."""
        done = super().flush_cache(empty_cache)
        if self.psd is not None and done:
            for slot in self.psd_slots:
                slot.last = None
        return done

    # --- records --------------------------------------------------------------------------------

    def _psd_record(self, slot: Slot, flight: InFlight, result_s: float, commit_s: float) -> None:
        start_s, end_s = self.psd_timer.interval(flight.timer)
        rids = [req.rid for req in flight.batch.reqs]
        if flight.taken is None:
            self.psd_stats.overlap.add_verify(start_s, end_s)
            if self.psd_trace is not None:
                tokens = flight.batch.extend_num_tokens or 0
                self.psd_trace.write_prefill(slot.index, rids, tokens, start_s, end_s)
            return
        rows = [row for row in flight.taken.rows if row is not None]
        lengths = flight.result.accept_lens.tolist()
        record = RoundRecord(
            slot=slot.index,
            mode=self.psd.mode,
            sizes=flight.sizes,
            rids=rids,
            num_steps=self.server_args.speculative_num_steps,
            verified=sum(len(row.tokens) for row in rows),
            accepted=sum(lengths) - len(lengths),
            emitted=sum(lengths),
            rows_with_drafts=len(rows),
            late_rows=flight.taken.late,
            wait_s=flight.taken.wait_s,
            launch_s=flight.launch_s,
            verify_start_s=start_s,
            verify_end_s=end_s,
            result_s=result_s,
            commit_s=commit_s,
            draft_start_s=flight.taken.draft_start_s,
            draft_end_s=flight.taken.draft_end_s,
            preempted=self._psd_preempted,
        )
        self._psd_preempted = []
        self.psd_stats.add_round(record)
        if self.psd_trace is not None:
            self.psd_trace.write_round(record)

    def get_internal_state(self, recv_req):
        """Add the ``psd`` section to ``/server_info``."""
        output = super().get_internal_state(recv_req)
        if self.psd is not None:
            output.internal_state["psd"] = self.psd_report()
        return output

    def psd_report(self) -> dict[str, Any]:
        """Mode, slots, figures and drafter, as ``/server_info`` shows them."""
        client, process = self.psd_client, self.psd_process
        drafting = client is not None and client.usable
        report: dict[str, Any] = {
            "mode": self.psd.mode if drafting else "off",
            "configured_mode": self.psd.mode,
            "num_steps": self.server_args.speculative_num_steps,
            "slot_sizes": [len(slot.live_requests()) for slot in self.psd_slots],
            **self.psd_stats.summary(),
        }
        if process is not None and process.hello is not None:
            hello = process.hello
            report["drafter"] = {
                "pid": hello.pid,
                "device": hello.device,
                "kv_tokens": hello.kv_tokens,
                "weight_gb": round(hello.weight_gb, 3),
                "kv_gb": round(hello.kv_gb, 3),
                "load_s": round(hello.load_s, 2),
                "open_requests": client.open_requests if client else 0,
                "failure": client.failure if client else None,
            }
        return report

    def psd_check_integrity(self) -> None:
        """Each request in one slot only, and SGLang's pool accounting over all of them.

        Raises
        ------
        AssertionError
            The accounting is broken; the message says where.
        """
        owners: dict[str, int] = {}
        for slot in self.psd_slots:
            for req in slot.live_requests():
                assert owners.setdefault(req.rid, slot.index) == slot.index, f"{req.rid} is in two slots"
        self.invariant_checker.self_check_during_busy()

    def psd_shutdown(self) -> None:
        """Stop the drafter and close the trace."""
        if self.psd_trace is not None:
            self.psd_trace.close()
        if self.psd_process is not None:
            self.psd_process.stop()


def _uses_psd(server_args) -> bool:
    return (server_args.speculative_algorithm or "").upper() == ALGORITHM
