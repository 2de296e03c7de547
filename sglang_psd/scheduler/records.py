"""What a finished forward leaves in statistics, trace and ``/server_info``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_psd.scheduler.answers import DraftAnswer
from sglang_psd.scheduler.slot import InFlight, Slot
from sglang_psd.telemetry.stats import RoundRecord

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler as _Base
else:
    _Base = object


class RecordsMixin(_Base):
    """Counts rounds; nothing in here touches the device."""

    _psd_preempted: list[str]
    _psd_answers: list[DraftAnswer]
    _psd_noted: list[tuple[Slot, InFlight]]

    def _psd_note(self, slot: Slot, flight: InFlight) -> None:
        """Remember a forward that has been processed, for ``_psd_write_down``."""
        flight.result.logits_output = None  # the next launch may need the room
        self._psd_noted.append((slot, flight))

    def _psd_write_down(self) -> None:
        """Statistics and trace of what has been processed and answered: not while a launch waits for it."""
        noted, self._psd_noted = self._psd_noted, []
        for slot, flight in noted:
            self._psd_record(slot, flight)
        for answer in self._psd_answers:
            self.psd_stats.add_draft(answer.sent_s, answer.started_s, answer.finished_s)
            if self.psd_trace is not None:
                span = (answer.started_s, answer.finished_s)
                self.psd_trace.write_draft(answer.round_id, answer.rids, answer.sent_s, answer.received_s, span)
        self._psd_answers.clear()

    def _psd_record(self, slot: Slot, flight: InFlight) -> None:
        start_s, end_s = self.psd_timer.interval(flight.timer)
        rids = [req.rid for req in flight.batch.reqs]
        if flight.taken is None:
            self.psd_stats.overlap.add_verify(start_s, end_s)
            if self.psd_trace is not None:
                tokens = flight.batch.extend_num_tokens or 0
                self.psd_trace.write_prefill(slot.index, rids, tokens, start_s, end_s)
            return
        counts = flight.taken.drafts.counts
        lengths = flight.result.accept_lens.tolist()
        record = RoundRecord(
            slot=slot.index,
            mode=self.psd.mode,
            sizes=flight.sizes,
            rids=rids,
            num_steps=self.server_args.speculative_num_steps,
            verified=int(counts.sum()),
            accepted=sum(lengths) - len(lengths),
            emitted=sum(lengths),
            rows_with_drafts=int((counts > 0).sum()),
            late_rows=flight.taken.late,
            wait_s=flight.taken.wait_s,
            launch_s=flight.launch_s,
            verify_start_s=start_s,
            verify_end_s=end_s,
            result_s=flight.result_s,
            commit_s=flight.commit_s,
            draft_start_s=flight.taken.draft_start_s,
            draft_end_s=flight.taken.draft_end_s,
            preempted=self._psd_preempted,
        )
        self._psd_preempted = []
        self.psd_stats.add_round(record)
        self._psd_watch_acceptance(flight.batch.reqs, counts.tolist(), [length - 1 for length in lengths])
        if self.psd_trace is not None:
            self.psd_trace.write_round(record)

    def get_internal_state(self, recv_req):
        """Add the ``psd`` section to ``/server_info``, and the accept length where ``bench_serving`` looks for it."""
        output = super().get_internal_state(recv_req)
        if self.psd is not None:
            output.internal_state["psd"] = self.psd_report()
            if self.psd_stats.requests_verified:
                # SGLang's own figure is brought up to date by its log line only, once in forty rounds.
                output.internal_state["avg_spec_accept_length"] = self.psd_stats.summary()["accept_length"]
        return output

    def psd_report(self) -> dict[str, Any]:
        """Mode, slots, figures and drafter, as ``/server_info`` shows them."""
        self._psd_supervise()  # what is reported is what is so now, and of one moment
        client, process = self.psd_client, self.psd_process
        self._psd_write_down()
        drafting = client is not None and client.drafting
        report: dict[str, Any] = {
            "mode": self.psd.mode if drafting else "off",
            "configured_mode": self.psd.mode,
            "num_steps": self.server_args.speculative_num_steps,
            "slot_sizes": [len(slot.live_requests()) for slot in self.psd_slots],
            **self.psd_stats.summary(),
        }
        if self.psd_handoff is not None:
            report["features"] = self.psd_handoff.totals.summary()
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
                "state": self._psd_drafter_state(),
                "standby": self.psd_supervisor.standby_state if self.psd_supervisor else "off",
                "restarts": self.psd_supervisor.restarts if self.psd_supervisor else 0,
                "reopened": client.reopened if client else 0,
                "resyncs": client.resyncs if client else 0,
            }
        return report

    def _psd_drafter_state(self) -> str:
        """``up``, ``late`` (not waited for), ``waiting`` (for a restart), ``starting`` or ``given up``."""
        state = self.psd_supervisor.state if self.psd_supervisor is not None else "up"
        client = self.psd_client
        return "late" if state == "up" and client is not None and client.usable and not client.drafting else state
