"""Prometheus figures of the drafter."""

from __future__ import annotations

from prometheus_client import REGISTRY

from sglang_psd.telemetry.metrics import DrafterMetrics


def test_figures_follow_the_drafter() -> None:
    metrics, labels = DrafterMetrics("some-model"), {"model_name": "some-model"}
    for drafting in (True, True, False, True):
        metrics.set_drafting(drafting)
        assert REGISTRY.get_sample_value("sglang:psd_drafting", labels) == float(drafting)
    metrics.count_loss()
    metrics.count_loss()
    assert REGISTRY.get_sample_value("sglang:psd_drafter_losses_total", labels) == 2.0
