"""SGLang's scheduler with two slots that take turns.

One turn of a slot: receive requests, plan the slot's batch (prefill first, as SGLang does), take its drafts, launch
it, then finish whatever else is in flight. Finishing has two halves: *collect* waits for the tokens and sends them to
the drafter at once; the book-keeping (finish checks, streaming, metrics) comes after. What is over before the launch is
collected before it, also while the slot still waits for its drafts. Because a slot's tokens are on the host before its
next launch, sequence lengths are exact.

The synchronous twin of the loop finishes a forward right after its launch: the oracle of the overlapped one.

The precedent for several running batches is SGLang's ``scheduler_pp_mixin.py``. The neighbours of this file hold the
rest: ``membership.py`` (who runs in which slot), ``drafting.py`` (the drafter), ``recovery.py`` (its loss and return),
``oversight.py`` (abort, pause, idle: all slots at once), ``records.py``.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.utils import DynamicGradMode

from sglang_psd import early
from sglang_psd.channel import lanes
from sglang_psd.config import uses_psd
from sglang_psd.scheduler import room
from sglang_psd.scheduler.controls import ControlsMixin
from sglang_psd.scheduler.drafting import DraftingMixin
from sglang_psd.scheduler.drafts import DraftClient
from sglang_psd.scheduler.guards import GuardsMixin
from sglang_psd.scheduler.launch import DrafterLauncher, visible_drafter_device
from sglang_psd.scheduler.membership import AllPlacesDelayer, MembershipMixin
from sglang_psd.scheduler.oversight import OversightMixin
from sglang_psd.scheduler.records import RecordsMixin
from sglang_psd.scheduler.recovery import RecoveryMixin
from sglang_psd.scheduler.refusals import RefusalsMixin
from sglang_psd.scheduler.reports import ReportsMixin
from sglang_psd.scheduler.slot import EmptyView, InFlight, Slot, UnionView
from sglang_psd.scheduler.slots import next_turn
from sglang_psd.scheduler.stops import ChunkEnds
from sglang_psd.scheduler.timing import ForwardTimer
from sglang_psd.target.requests import drop_stock_penalties
from sglang_psd.target.workspace import reserve_workspace
from sglang_psd.telemetry.stats import PSDStats
from sglang_psd.telemetry.trace import TraceWriter
from sglang_psd.transfer import to_device

if TYPE_CHECKING:
    from sglang_psd.channel.draft_rows import DraftBatch
    from sglang_psd.drafter.process import DrafterProcess

logger = logging.getLogger(__name__)


class PSDSchedulerMixin(
    MembershipMixin,
    DraftingMixin,
    RecoveryMixin,
    OversightMixin,
    ControlsMixin,
    GuardsMixin,
    RecordsMixin,
    RefusalsMixin,
    ReportsMixin,
):
    """Overrides for ``sglang.srt.managers.scheduler.Scheduler``; inert unless the algorithm is PSD.

    Attributes
    ----------
    psd : PSDConfig or None
        None on a server of another algorithm.
    psd_slots : list of Slot
    psd_client : DraftClient or None
        Only on rank 0.
    psd_stats : PSDStats
    """

    psd: Any = None
    psd_slots: list[Slot]
    psd_client: DraftClient | None = None
    psd_process: DrafterProcess | None = None
    _psd_preempted: list[str]
    _psd_planning: Slot | None = None
    min_free_slots_delayer: Any

    # --- start ----------------------------------------------------------------------------------

    def init_model_worker(self) -> None:
        """Spawn the drafter, load the target, join the drafter: both load side by side."""
        if not uses_psd(self.server_args):
            return super().init_model_worker()
        self.psd = self.server_args.psd()
        self.psd_stats = PSDStats()
        self.psd_turn = 0
        self._psd_preempted = []
        self._psd_answers = []
        self._psd_noted = []
        self._psd_refused = {}
        process = self._psd_spawn_drafter() if self.ps.tp_rank == 0 else None
        if (begun := early.take()) is not None:  # not rank 0: it has no drafter
            begun.standby.end()
        super().init_model_worker()
        if self.min_free_slots_delayer is not None:
            self.min_free_slots_delayer = AllPlacesDelayer(self.min_free_slots_delayer, self)
        if process is not None:
            process.join(self.psd.start_timeout_s)
            self._psd_adopt(process)
            self._psd_start_recovery()
        self.psd_trace = TraceWriter(self.psd.trace) if process is not None and self.psd.trace else None
        self.psd_timer = ForwardTimer(self.device)
        logger.info(
            "PSD is on: mode %s, %d drafts a round, %s loop.",
            self.psd.mode,
            self.server_args.speculative_num_steps,
            "synchronous" if self._psd_synchronous else "overlapped",
        )

    def _psd_spawn_drafter(self) -> DrafterProcess:
        self.psd_device = visible_drafter_device(self.server_args, self.psd, self.ps.gpu_id)
        self.psd_launcher = DrafterLauncher(self.server_args, self.psd, self.psd_device)
        process = self.psd_launcher.launch_first()
        if self.psd_device.shared:
            # On one GPU the target measures what is left for its own KV: the drafter has to have its share by then.
            process.join(self.psd.start_timeout_s)
        return process

    def init_all_attention_backends(self) -> None:
        """Give the verify of a full slot the scratch memory it needs, before a backend takes SGLang's size."""
        if self.psd is not None and self.server_args.device == "cuda":
            reserve_workspace(self.tp_worker.model_runner, self.server_args.speculative_num_steps + 1)
        super().init_all_attention_backends()

    @property
    def _psd_synchronous(self) -> bool:
        return self.psd.loop == "synchronous"

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
        if self.ps.tp_rank == 0:
            self.draft_worker.update_draft = self._psd_update_draft
            if self.psd.queue_ahead and self._psd_may_queue_ahead():
                self.draft_worker.queue_ahead()

    def _psd_may_queue_ahead(self) -> bool:
        """Whether nothing that the drafts need ends up behind the verify that waits for them.

        A drafter on the same GPU computes beside it; other ranks queue nothing before they have been told. A processor
        other than x86-64 may show the device the word that lets a verify go before it shows the drafts. With a head it
        has been seen in the test rig only.
        """
        own_gpu = self.server_args.device == "cuda" and not self.psd_device.shared and lanes.supported()
        return own_gpu and self.ps.tp_size == 1 and self.psd_handoff is None

    def psd_turn_of(self, slot: Slot) -> None:
        """One turn: plan, launch, finish the others."""
        self._psd_supervise()
        self._psd_finish(slot)
        self._psd_collect_ready(slot)
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
        room.set_elsewhere([r for s in self.psd_slots if s is not slot for r in s.live_requests()], self._psd_cut(slot))
        try:
            plan = self.get_next_batch_to_run(running_batch=slot.running, last_batch=slot.last)
        finally:
            self._psd_planning = None
        slot.running = plan.running_batch
        self.running_batch = slot.running
        if plan.batch_to_run is not None:
            drop_stock_penalties(plan.batch_to_run)
        # SGLang's watchdog looks at it: while anything is in flight the server is not at rest.
        launched = (s.in_flight.batch for s in self.psd_slots if s.in_flight is not None)
        self.cur_batch_for_debug = plan.batch_to_run or next(launched, None)
        return plan.batch_to_run

    def _psd_launch(self, slot: Slot, batch: ScheduleBatch) -> None:
        sizes = tuple(len(s.live_requests()) for s in self.psd_slots)
        flight = InFlight(sizes)
        self._psd_open(batch.reqs)
        if batch.forward_mode.is_extend():
            self._psd_begin(flight)
        else:
            # The worker asks for the drafts when all else is ready: their way to the GPU is short then. While it does,
            # other slots may be collected.
            self.draft_worker.stage(
                lambda: self._psd_fetch(slot, batch, flight),
                lambda: self._psd_begin(flight),
                ahead=not any(other.in_flight is not None and other.in_flight.needs_device for other in self.psd_slots),
            )
        flight.result = self.run_batch(batch)
        self.psd_timer.stop(flight.timer)
        # While the device works.
        self._psd_write_down()
        flight.ends = ChunkEnds.of(batch.reqs)
        flight.prospects = self._psd_prospects(batch.reqs)
        flight.batch = batch.copy()
        flight.features = self.draft_worker.take_features()
        flight.calls = self.draft_worker.take_calls()
        slot.in_flight = flight
        slot.last = batch
        for other in self.psd_slots:
            # A prompt read in chunks goes on in whichever slot comes next: the one it left must not count it.
            if other is not slot and other.last is not None and other.last.chunked_req in batch.reqs:
                other.last.filter_batch(chunked_req_to_exclude=other.last.chunked_req)

    def _psd_fetch(self, slot: Slot, batch: ScheduleBatch, flight: InFlight) -> DraftBatch:
        flight.taken = self._psd_take(batch.reqs, watch=lambda: self._psd_collect_ready(slot))
        flight.launch_s = time.monotonic()
        return flight.taken.drafts

    def _psd_begin(self, flight: InFlight) -> None:
        flight.launch_s = time.monotonic()
        flight.timer = self.psd_timer.start()

    def _psd_collect(self, flight: InFlight) -> None:
        """Wait for a forward's tokens and send them to the drafter; changes nothing that SGLang looks at."""
        if flight.collected:
            return
        flight.collected = True
        self.psd_timer.wait(flight.timer)
        if flight.result.copy_done is not None:
            flight.result.copy_done.synchronize()
        flight.result_s = time.monotonic()
        self._psd_settle(flight)
        self._psd_hand_over(flight)
        flight.commit_s = self._psd_commit_early(flight)
        flight.lengths_before = {req.rid: len(req.output_ids) for req in flight.batch.reqs}

    def _psd_collect_ready(self, slot: Slot) -> bool:
        """Collect what is over in the other slots, so that the drafter need not wait for this slot's launch.

        Returns whether something is still running there. Ranks may see this at different times: nothing but the
        drafter, which only rank 0 talks to, notices.
        """
        running = False
        for other in self.psd_slots:
            flight = other.in_flight
            if other is slot or flight is None or flight.collected:
                continue
            if self.psd_timer.done(flight.timer):
                self._psd_collect(flight)
            else:
                running = True
        return running

    def _psd_finish(self, slot: Slot) -> None:
        """Process what ``slot`` has in flight, if anything: commit first, book-keep after."""
        flight = slot.in_flight
        if flight is None:
            return
        slot.in_flight = None
        self._psd_enter(slot)
        self._psd_collect(flight)
        self.process_batch_result(flight.batch, flight.result)
        self._psd_commit_rest(flight)
        if flight.taken is not None:
            self._psd_refresh_lengths(slot.running)
        self._psd_note(slot, flight)

    def _psd_rest(self) -> None:
        self._psd_write_down()
        self.psd_stats.pause()
        if self.psd_trace is not None:
            self.psd_trace.flush()
        # Nothing runs: what the drafter still holds was aborted on the way to a slot.
        if self.psd_client is not None and not self.waiting_queue and self.chunked_req is None:
            self.psd_client.close_all()
        self.on_idle()

    def _psd_refresh_lengths(self, running: ScheduleBatch) -> None:
        """Lengths after a verify come from the host: exact, and no readback."""
        if running.is_empty():
            return
        import torch

        lengths = torch.tensor([req.kv_committed_len for req in running.reqs], dtype=torch.int64)
        running.seq_lens_cpu = lengths
        running.seq_lens = to_device(lengths, running.device)
        running.seq_lens_sum = int(lengths.sum())
        running.orig_seq_lens = running.seq_lens.to(running.orig_seq_lens.dtype)
