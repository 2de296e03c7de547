"""SGLang's log lines and gauges, which count the requests of one running batch, count those of all slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler as _Base
else:
    _Base = object


class ReportedBatch:
    """A slot's batch for ``SchedulerMetricsReporter``: its own size and tokens, the requests of every slot.

    Parameters
    ----------
    batch : ScheduleBatch
        What has been processed.
    elsewhere : callable
        Running requests that are not in it; asked only where a report looks at requests.
    whole_lengths : bool
        Whether ``seq_lens_cpu`` is that of all requests (the gauge of decoded context), not of the batch (what a
        forward reads, for ``--enable-mfu-metrics``).
    """

    def __init__(self, batch: Any, elsewhere: Callable[[], list[Req]], whole_lengths: bool):
        self._batch, self._elsewhere, self._whole_lengths = batch, elsewhere, whole_lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    @property
    def reqs(self) -> list[Req]:
        """Requests of the batch and all others that run."""
        return [*self._batch.reqs, *self._elsewhere()]

    @property
    def seq_lens_cpu(self) -> torch.Tensor | None:
        """None: SGLang then adds up the lengths of ``reqs``."""
        return None if self._whole_lengths else self._batch.seq_lens_cpu


class ReportsMixin(_Base):
    """Stands between SGLang's result processing and its reports."""

    def init_metrics_reporter(self, *args: Any, **kwargs: Any) -> None:
        """SGLang's override point for a special reporter."""
        super().init_metrics_reporter(*args, **kwargs)
        if self.psd is None:
            return
        reporter = self.metrics_reporter
        report_decode, report_prefill = reporter.report_decode_stats, reporter.report_prefill_stats

        def report_decode_stats(can_run_cuda_graph: bool, running_batch: Any, num_correct_drafts: int = 0) -> None:
            view = ReportedBatch(
                running_batch, lambda: self._psd_running_beside(running_batch), not reporter.enable_mfu_metrics
            )
            report_decode(can_run_cuda_graph, running_batch=view, num_correct_drafts=num_correct_drafts)

        def report_prefill_stats(batch: Any, prefill_stats: Any, *rest: Any, **more: Any) -> None:
            from sglang.srt.observability.metrics_collector import QueueCount

            running = QueueCount.from_reqs(self._psd_running_beside(batch), self.enable_priority_scheduling)
            report_prefill(batch, dataclasses.replace(prefill_stats, num_running_reqs=running), *rest, **more)

        reporter.report_decode_stats, reporter.report_prefill_stats = report_decode_stats, report_prefill_stats

    def _psd_running_beside(self, batch: Any) -> list[Req]:
        """Unfinished requests of all slots that are not in ``batch``."""
        inside = set(map(id, batch.reqs))
        return [req for slot in self.psd_slots for req in slot.live_requests() if id(req) not in inside]

    def _psd_count_retraction(self, req: Req) -> None:
        """Count a request that made room for the other slot, as SGLang counts those of its own retraction."""
        reporter = self.metrics_reporter
        reporter.num_retracted_reqs += 1
        if reporter.enable_metrics:
            reporter.metrics_collector.increment_retracted_reqs(
                num_retracted_reqs=1,
                num_retracted_input_tokens=len(req.origin_input_ids),
                num_retracted_output_tokens=len(req.output_ids),
            )
