"""FlashInfer's verify plans from lengths that the host knows.

FlashInfer plans a verify by reading its lengths back from the device, which waits for whatever runs there: the other
slot's verify. The lengths are known here, so the plan is made from them; SGLang does the same for its own draft models
(``fast_prefill_plan`` in ``sglang/srt/layers/attention/flashinfer_backend.py``), whose planning is used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


class HostPlans:
    """Keeps the verify graphs of FlashInfer from reading back; other attention backends have nothing to plan.

    Parameters
    ----------
    model_runner : ModelRunner
        The target's.
    chunk : int
        Tokens per request of a verify, K + 1.
    """

    def __init__(self, model_runner: Any, chunk: int):
        self._runner = model_runner
        self._chunk = chunk
        self._lens = torch.zeros(0, dtype=torch.int64)
        self._copied: dict[int, Any] = {}

    def announce(self, seq_lens_cpu: torch.Tensor) -> None:
        """Say the committed lengths ``[B] int64`` (host) of the verify that is planned next."""
        self._lens = seq_lens_cpu
        graphs = getattr(self._runner, "decode_cuda_graph_runner", None)
        buckets = getattr(getattr(graphs, "attn_backend", None), "prefill_cuda_graph_metadata", None)
        if not isinstance(buckets, dict):
            return
        for wrappers in buckets.values():
            for wrapper in wrappers:
                planned = getattr(wrapper.begin_forward, "func", None) == self._plan
                # The first plan, at capture, is FlashInfer's own: it chooses the kernel.
                if not planned and wrapper._backend == "fa2" and getattr(wrapper, "_cached_module", None) is not None:
                    wrapper.begin_forward = partial(self._plan, wrapper)

    def _plan(self, wrapper: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.layers.attention.flashinfer_backend import fast_prefill_plan

        num_rows = wrapper._paged_kv_last_page_len_buf.shape[0]
        lens = torch.ones(num_rows, dtype=torch.int32)  # SGLang pads with requests of length 1
        lens[: len(self._lens)] = self._lens
        lens += self._chunk
        ends = torch.zeros(num_rows + 1, dtype=torch.int32)
        torch.cumsum(lens, 0, dtype=torch.int32, out=ends[1:])
        previous = self._copied.get(id(wrapper))
        if previous is not None:
            previous.synchronize()  # the plan travels from one pinned buffer: its last copy must have left
        fast_prefill_plan(
            wrapper,
            *args,
            **kwargs,
            qo_indptr_host=torch.arange(0, (num_rows + 1) * self._chunk, self._chunk, dtype=torch.int32),
            kv_indptr_host=ends,
            kv_lens_host=lens,
            max_q_len=self._chunk,
            max_kv_len=int(lens.max()),
        )
        event = previous if previous is not None else torch.cuda.Event()
        event.record()
        self._copied[id(wrapper)] = event
