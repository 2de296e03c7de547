"""Taking requests out of a running batch, as a batch of their own."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from sglang_psd.target.requests import drop_stock_penalties

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def split_off(batch: ScheduleBatch, count: int) -> ScheduleBatch | None:
    """Remove up to ``count`` requests from ``batch`` and return them as a new batch.

    ``batch`` must be filtered and have nothing in flight.

    Returns
    -------
    ScheduleBatch or None
        None when there is no request to move.
    """
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    first = max(0, len(batch.reqs) - count)
    staying, moving = list(range(first)), list(range(first, len(batch.reqs)))
    if not moving:
        return None
    moved = copy.copy(batch)
    # Both halves filter their sampling state in place: it must not be shared.
    moved.reqs = [batch.reqs[i] for i in moving]
    moved.sampling_info = SamplingBatchInfo.from_schedule_batch(moved, batch.model_config.vocab_size)
    for code, (_, rows) in (moved.sampling_info.custom_logit_processor or {}).items():
        # SGLang makes an object for each batch; one that remembers its calls would begin anew with every move.
        moved.sampling_info.custom_logit_processor[code] = (batch.sampling_info.custom_logit_processor[code][0], rows)
    drop_stock_penalties(moved)
    full, moved.sampling_info = moved.sampling_info, _Unfiltered()
    moved.reqs = batch.reqs
    moved.filter_batch(keep_indices=moving)
    moved.sampling_info = full
    batch.filter_batch(keep_indices=staying)
    return moved


class _Unfiltered:
    """Stands in for sampling state while the tensors beside it are filtered."""

    def filter_batch(self, keep_indices, keep_indices_device) -> None:
        """Keep nothing, lose nothing."""
