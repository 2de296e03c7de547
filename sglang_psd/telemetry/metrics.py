"""Prometheus figures of the drafter, beside SGLang's own under ``/metrics`` (``--enable-metrics``)."""

from __future__ import annotations


class DrafterMetrics:
    """Whether the server drafts, and how often it lost its drafter.

    Parameters
    ----------
    model_name : str
        Label of SGLang's metrics.
    """

    def __init__(self, model_name: str):
        # As in SGLang's collectors: the library reads its multi-process folder when it is imported.
        from prometheus_client import Counter, Gauge

        labels = {"model_name": model_name}
        self._drafting = Gauge(
            "sglang:psd_drafting",
            "1 while rounds expect drafts, 0 while PSD runs without.",
            list(labels),
            multiprocess_mode="mostrecent",
        ).labels(**labels)
        self._losses = Counter(
            "sglang:psd_drafter_losses_total", "Drafters that were lost since the server started.", list(labels)
        ).labels(**labels)
        self._drafting_was: bool | None = None

    def set_drafting(self, drafting: bool) -> None:
        """Note whether drafts are expected; cheap when nothing has changed."""
        if drafting is not self._drafting_was:
            self._drafting_was = drafting
            self._drafting.set(int(drafting))

    def count_loss(self) -> None:
        """A drafter was lost."""
        self._losses.inc()
