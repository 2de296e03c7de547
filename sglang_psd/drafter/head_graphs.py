"""Each step of an EAGLE head's chain as one CUDA graph per batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_psd.drafter.chain import Chain
from sglang_psd.drafter.columns import Kinds
from sglang_psd.drafter.graphs import ChainGraphs, Stage
from sglang_psd.drafter.head_chain import HeadColumns, Vocabulary, run_head_step
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
        self._width = spec.num_steps + 1
        rows = self._width * spec.max_requests
        self._features = torch.zeros(rows, spec.head.feature_size, dtype=runner.dtype, device=runner.device)
        # What each captured step leaves for the next one: tensors of the graphs.
        self._hidden: dict[tuple[int, Kinds, int], torch.Tensor] = {}
        super().__init__(runner, spec, generator)

    def _steps(self) -> list[tuple[int, int]]:
        return [(0, self._width), *((step, 1) for step in range(1, self._spec.num_steps))]

    def _vocabulary_size(self) -> int:
        return self._vocabulary.size

    def _columns(self, size: int, device: str, *, pinned: bool = False) -> HeadColumns:
        return HeadColumns.empty(size, self._width, device, pinned=pinned)

    # --- capture --------------------------------------------------------------------------------

    def _run_stage(self, size: int, kinds: Kinds, stage: Stage) -> None:
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        def decode(rows, lens, positions, ids, hidden) -> tuple[torch.Tensor, torch.Tensor]:
            batch = self._forward_batch(rows, lens, None, ids, self._slots(rows, lens), positions)
            batch.capture_hidden_mode = CaptureHiddenMode.LAST
            output = self._forward(stage, batch, EagleDraftInput(hidden_states=hidden))
            return output.next_token_logits, output.hidden_states

        self._hidden[size, kinds, stage.step] = run_head_step(
            decode,
            self._static[size],
            self._hidden[size, kinds, stage.step - 1] if stage.step else self._features[: self._width * size],
            self._chains[size],
            kinds,
            self._uniforms[:, :size] if kinds.sampled else None,
            stage.step,
            self._vocabulary,
        )

    def _step_batch(self, columns: HeadColumns, stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
        return columns.step_batch(stage.step)[:2]

    # --- replay ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def draft(self, states: Sequence[HeadState]) -> tuple[Chain, Kinds]:
        """Feed what waits of the given requests and draft for them; tensors of the result are the graphs' own."""
        size = self._size_for(len(states))
        host, static = self._host[size], self._static[size]
        kinds, picks = host.fill(states)
        pieces = [piece for state in states for piece in state.take(state.feedable)]
        index = to_device(torch.tensor(picks), self._runner.device)
        torch.index_select(torch.cat(pieces), 0, index, out=self._features[: len(picks)])
        static.base.copy_(host.base)
        static.extra.copy_(host.extra, non_blocking=True)
        return self._replay(size, kinds, self._width), kinds
