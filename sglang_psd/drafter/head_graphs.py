"""A whole chain of an EAGLE head as one CUDA graph per batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_psd.drafter.chain import Chain
from sglang_psd.drafter.columns import Kinds
from sglang_psd.drafter.graphs import ChainGraphs
from sglang_psd.drafter.head_chain import HeadColumns, Vocabulary, run_head_chain
from sglang_psd.drafter.head_rows import HeadState
from sglang_psd.transfer import to_device

if TYPE_CHECKING:
    from sglang_psd.drafter.spec import DrafterSpec


class HeadGraphs(ChainGraphs):
    """Captures at start and replays, as ``ChainGraphs``; the target's hidden states are one input more.

    Parameters
    ----------
    runner, spec, generator
        As ``ChainGraphs``.
    vocabulary : Vocabulary
    """

    def __init__(self, runner: Any, spec: DrafterSpec, generator: torch.Generator, vocabulary: Vocabulary):
        assert spec.head is not None
        self._vocabulary = vocabulary
        self._first_width = spec.num_steps + 1
        rows = self._first_width * spec.max_requests
        self._features = torch.zeros(rows, spec.head.feature_size, dtype=runner.dtype, device=runner.device)
        super().__init__(runner, spec, generator)

    def _columns(self, size: int, device: str, *, pinned: bool = False) -> HeadColumns:
        return HeadColumns.empty(size, self._first_width, device, pinned=pinned)

    # --- capture --------------------------------------------------------------------------------

    def _chain(self, size: int, kinds: Kinds) -> Chain:
        return run_head_chain(
            self._decode_head,
            self._static[size],
            self._features[: self._first_width * size],
            kinds,
            self._uniforms[:, :size] if kinds.sampled else None,
            self._spec.num_steps,
            self._spec.top_m,
            self._vocabulary,
        )

    def _decode_head(self, step: int, rows, lens, positions, ids, hidden) -> tuple[torch.Tensor, torch.Tensor]:
        from sglang.srt.layers.dp_attention import set_dp_buffer_len, set_is_extend_in_batch
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        batch = self._forward_batch(rows, lens, None, ids)
        batch.positions, batch.capture_hidden_mode = positions, CaptureHiddenMode.LAST
        backend = self._backends[step]
        with forward_context(ForwardContext(attn_backend=backend)):
            set_dp_buffer_len(None, len(rows), self._padding_mode.is_max_len(), None)
            set_is_extend_in_batch(False)
            # Planned as a plain batch: backends would look for SGLang's own draft loop behind a draft input.
            backend.init_forward_metadata_in_graph(batch)
            batch.spec_info = EagleDraftInput(hidden_states=hidden)
            output = self._runner.model.forward(ids, positions, batch)
        return output.next_token_logits, output.hidden_states

    def _plan(self, size: int, *, in_capture: bool = False) -> None:
        """Let each step's backend prepare for the columns of this size (host and device copy agree)."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        device, host = self._static[size], self._host[size]
        rows, lens, _, ids = device.first_batch()
        lens_cpu = host.first_batch()[1]
        for step, backend in enumerate(self._backends):
            if step:
                rows, lens, _ = device.later_batch(step)
                lens_cpu, ids = host.later_batch(step)[1], device.base.last
            batch = self._forward_batch(rows, lens, lens_cpu, ids)
            with forward_context(ForwardContext(attn_backend=backend)):
                backend.init_forward_metadata_out_graph(batch, in_capture=in_capture)

    # --- replay ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, states: Sequence[HeadState]) -> tuple[Chain, Kinds]:
        """Feed what waits of the given requests and draft for them; tensors of the result are the graph's own."""
        size = next(size for size in self._buckets if size >= len(states))
        host, static = self._host[size], self._static[size]
        kinds, picks = host.fill(states)
        pieces = [piece for state in states for piece in state.take(state.feedable)]
        index = to_device(torch.tensor(picks), self._runner.device)
        torch.index_select(torch.cat(pieces), 0, index, out=self._features[: len(picks)])
        static.base.ints.copy_(host.base.ints, non_blocking=True)
        static.base.floats.copy_(host.base.floats, non_blocking=True)
        static.extra.copy_(host.extra, non_blocking=True)
        return self._replay(size, kinds), kinds
