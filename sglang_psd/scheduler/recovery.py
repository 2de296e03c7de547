"""From a drafter that is lost, hung or useless back to drafting, or to the decision to go on without."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_psd.compat import check_draft_model
from sglang_psd.errors import ProtocolError
from sglang_psd.scheduler.acceptance_watch import AcceptanceWatch, Verdict
from sglang_psd.scheduler.standby import StandbyKeeper
from sglang_psd.scheduler.supervisor import DrafterSupervisor
from sglang_psd.telemetry.metrics import DrafterMetrics

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler as _Base

    from sglang_psd.drafter.process import DrafterProcess
    from sglang_psd.scheduler.drafts import DraftClient
    from sglang_psd.scheduler.handoff import FeatureSender
    from sglang_psd.scheduler.launch import DrafterLauncher
else:
    _Base = object

logger = logging.getLogger(__name__)


def is_foreseeable(req: Req) -> bool:
    """Whether the drafter draws from what the target draws from; it knows of no penalties, biases or grammars.

    Above temperature 1 the target spreads over more tokens than the drafter proposes.
    """
    params = req.sampling_params
    return (
        req.grammar is None
        and not req.custom_logit_processor
        and not params.logit_bias
        and params.temperature <= 1.0
        and params.frequency_penalty == params.presence_penalty == 0.0
        and params.repetition_penalty == 1.0
    )


class RecoveryMixin(_Base):
    """Looks after the drafter once a turn; on rank 0 only, and never waiting for anything but new weights."""

    psd_client: DraftClient | None
    psd_process: DrafterProcess | None
    psd_launcher: DrafterLauncher
    psd_handoff: FeatureSender | None
    psd_supervisor: DrafterSupervisor | None = None
    psd_watch: AcceptanceWatch | None = None
    psd_metrics: DrafterMetrics | None = None

    def _psd_start_recovery(self) -> None:
        """The first drafter is up: look after it from now on."""
        config = self.psd
        launcher = self.psd_launcher
        self.psd_supervisor = DrafterSupervisor(
            launcher.launch,
            config.start_timeout_s,
            config.max_losses,
            config.max_restart_delay_s,
            standby=StandbyKeeper(launcher.launch_standby) if config.standby and config.restart else None,
        )
        self.psd_watch = AcceptanceWatch(config.acceptance_floor)
        if self.server_args.enable_metrics:
            self.psd_metrics = DrafterMetrics(self.server_args.served_model_name)

    def _psd_update_draft(self, path: str) -> str | None:
        """New weights for the draft model, also for drafters that are started later; says why not, if not."""
        if self.psd_client is None or not self.psd_client.usable:
            return "there is no drafter at the moment."
        if self.psd_handoff is not None:
            # Its matrices are in part the target's.
            return "an EAGLE head takes its weights at the server's start only."
        args = copy.copy(self.server_args)
        object.__setattr__(args, "speculative_draft_model_path", path)
        try:
            check_draft_model(args)
        except Exception as error:
            return str(error)
        problem = self.psd_client.load(path, self.psd.start_timeout_s)
        if problem is None:
            self.psd_launcher.draft_with(args)
            if self.psd_watch is not None:
                self.psd_watch = AcceptanceWatch(self.psd.acceptance_floor)
        return problem

    def _psd_supervise(self) -> None:
        """Notice a lost drafter, and take on its successor; requests are opened there as they come by."""
        client, supervisor, process = self.psd_client, self.psd_supervisor, self.psd_process
        if client is None or supervisor is None or process is None:
            return
        # SGLang drops some without a forward, such as the last request of a full pool.
        client.tend(lambda: {req.rid for req in self._psd_everybody()})
        if self.psd_metrics is not None:
            self.psd_metrics.set_drafting(client.drafting)
        if not client.usable and supervisor.state == "up":
            if self.psd_metrics is not None:
                self.psd_metrics.count_loss()
            self._psd_abandon(process)
            if self.psd.restart:
                supervisor.lost(process)
            else:
                supervisor.give_up("the drafter is lost, and 'restart' in --psd-config is false")
        successor = supervisor.tick()
        if successor is not None:
            self._psd_take_on(successor, supervisor)

    def _psd_take_on(self, successor: DrafterProcess, supervisor: DrafterSupervisor) -> None:
        """Draft with a drafter that is ready; one whose mailbox cannot be opened is as good as lost."""
        try:
            self._psd_adopt(successor)
        except ProtocolError as error:
            logger.error("PSD: a new drafter is of no use (%s).", error)
            successor.abandon()
            supervisor.lost(successor)

    def _psd_abandon(self, process: DrafterProcess) -> None:
        """Kill a drafter, and give back what of its memory is mapped here: its successor may need the room."""
        process.abandon()
        if self.psd_handoff is not None:
            self.psd_handoff.close()

    def _psd_watch_acceptance(self, reqs: Sequence[Req], verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Count a round's drafts, request by request; act when they have become worthless."""
        client, watch, supervisor = self.psd_client, self.psd_watch, self.psd_supervisor
        if client is None or watch is None or supervisor is None:
            return
        judged = [i for i, req in enumerate(reqs) if verified[i] and is_foreseeable(req)]
        verdict = watch.add(
            [reqs[i].rid for i in judged], sum(verified[i] for i in judged), sum(accepted[i] for i in judged)
        )
        if verdict is Verdict.REOPEN:
            logger.warning(
                "PSD: the accept rate fell from %.3f to %.3f; all requests are handed to the drafter again.",
                watch.usual,
                watch.latest,
            )
            client.reset()
        elif verdict is Verdict.OFF:
            reason = f"the accept rate stays at {watch.latest:.3f}, where {watch.usual:.3f} is usual"
            client.give_up(reason)
            supervisor.give_up(f"{reason} ('acceptance_floor': 0 in --psd-config would keep it on)")
            if self.psd_process is not None:
                self._psd_abandon(self.psd_process)
