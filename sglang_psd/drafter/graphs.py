"""Each step of a chain as one CUDA graph per batch size.

A step holds its forward, sampling and the sparse laws: the host has nothing to decide between two steps. Attention
takes SGLang's own backends through the contract that its draft runners use
(``sglang/srt/layers/attention/base_attn_backend.py``): metadata that needs the host is written before a replay. With a
graph and a backend for every step that happens while the step before runs; one graph for a whole chain would have to
wait until all its steps are planned.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sglang_psd.drafter.chain import CATCH_UP, Chain, run_step, step_batch
from sglang_psd.drafter.columns import Columns, Fill, Kinds

if TYPE_CHECKING:
    from sglang_psd.drafter.spec import DrafterSpec

logger = logging.getLogger(__name__)

VARIANTS = (Kinds(), Kinds(sampled=True), Kinds(sampled=True, seeded=True))
_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512)


def chain_buckets(max_requests: int) -> list[int]:
    """Batch sizes to capture, ascending; the last one is ``max_requests``."""
    return [size for size in _BUCKETS if size < max_requests] + [max_requests]


def variant_for(kinds: Kinds) -> Kinds:
    """The captured variant that serves a batch of these kinds."""
    return next(v for v in VARIANTS if v.sampled >= kinds.sampled and v.seeded >= kinds.seeded)


@dataclass
class Stage:
    """One step of a chain, with an attention backend of its own.

    Attributes
    ----------
    step : int
        A stage of step K draws nothing: it feeds the last draft.
    width : int
        Times that each request stands in its batch.
    backend : AttentionBackend
    graphs : dict
        By batch size and kinds of row.
    """

    step: int
    width: int
    backend: Any
    graphs: dict[tuple[int, Kinds], torch.cuda.CUDAGraph] = field(default_factory=dict)


class ChainGraphs:
    """Captures at start and replays.

    Parameters
    ----------
    runner : ModelRunner
        Of the draft model, its attention backend initialised.
    spec : DrafterSpec
    generator : torch.Generator
        On the device; feeds sampled rows.
    """

    def __init__(self, runner: Any, spec: DrafterSpec, generator: torch.Generator):
        from sglang.srt.layers.dp_attention import DpPaddingMode

        started = time.monotonic()
        self._runner = runner
        self._spec = spec
        self._generator = generator
        self._table = runner.req_to_token_pool.req_to_token
        self._sliding_window = runner.is_hybrid_swa
        self._padding_mode = DpPaddingMode.get_default_mode_in_cuda_graph()
        self._buckets = chain_buckets(spec.max_requests)
        largest = self._buckets[-1]
        self._host = {size: self._columns(size, "cpu", pinned=True) for size in self._buckets}
        self._static = {size: self._columns(size, runner.device) for size in self._buckets}
        law_size = min(spec.top_m, self._vocabulary_size())
        self._chains = {s: Chain.empty(spec.num_steps, s, law_size, runner.device) for s in self._buckets}
        self._uniforms = torch.zeros(spec.num_steps, largest, dtype=torch.float64, device=runner.device)
        self._stages = [self._make_stage(step, width, largest) for step, width in self._steps()]
        self._capture()
        graphs = sum(len(stage.graphs) for stage in self._stages)
        logger.info("Captured %d steps of draft chains in %.1f s.", graphs, time.monotonic() - started)

    def _steps(self) -> list[tuple[int, int]]:
        """Step and width of every stage, in the order in which they run."""
        last = self._spec.num_steps
        return [(0, CATCH_UP), *((step, 1) for step in range(last + 1))]

    def _vocabulary_size(self) -> int:
        return self._spec.vocab_limit

    def _columns(self, size: int, device: str, *, pinned: bool = False) -> Any:
        return Columns.empty(size, device, pinned=pinned)

    def _make_stage(self, step: int, width: int, largest: int) -> Stage:
        from sglang.srt.model_executor.model_runner_components.attention_backend_setup import get_attention_backend

        backend = get_attention_backend(model_runner=self._runner)
        backend.init_cuda_graph_state(width * largest, width * largest)
        return Stage(step, width, backend)

    # --- capture --------------------------------------------------------------------------------

    @torch.inference_mode()
    def _capture(self) -> None:
        from sglang.srt.distributed.parallel_state import graph_capture
        from sglang.srt.model_executor.runner import model_capture_mode
        from sglang.srt.model_executor.runner_backend_utils import CUDA_GRAPH_CAPTURE_FAILED_MSG
        from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_memory_pool

        pool = get_or_create_global_graph_memory_pool(torch.cuda)
        try:
            with model_capture_mode(), graph_capture() as context:
                for size in reversed(self._buckets):  # large ones first: the small ones reuse their memory
                    for stage in self._stages:
                        # One plan for all variants: a backend keeps one set of buffers per batch size.
                        self._plan(size, stage, in_capture=True)
                    for kinds in VARIANTS:
                        for stage in self._stages:
                            if self._draws(stage) or kinds == VARIANTS[0]:
                                stage.graphs[size, kinds] = self._capture_one(size, kinds, stage, pool, context.stream)
        except RuntimeError as error:
            raise RuntimeError(f"Capturing the draft chain failed: {error}\n{CUDA_GRAPH_CAPTURE_FAILED_MSG}") from error

    def _capture_one(self, size: int, kinds: Kinds, stage: Stage, pool: Any, stream: Any) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        self._run_stage(size, kinds, stage)  # loads kernels and pays their one-time costs outside the graph
        stage.backend.on_after_cuda_graph_warmup()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            self._run_stage(size, kinds, stage)
        return graph

    def _draws(self, stage: Stage) -> bool:
        return stage.step < self._spec.num_steps

    def _run_stage(self, size: int, kinds: Kinds, stage: Stage) -> None:
        """The device's part of a step."""

        def decode(rows: torch.Tensor, lens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return self._forward(
                stage, self._forward_batch(rows, lens, None, ids, self._slots(rows, lens), lens - 1)
            ).next_token_logits

        uniforms = self._uniforms[:, :size] if kinds.sampled else None
        run_step(
            decode,
            self._static[size],
            self._chains[size],
            kinds,
            uniforms,
            stage.step,
            stage.width,
            self._spec.vocab_limit,
        )

    def _forward(self, stage: Stage, batch: Any, spec_info: Any = None) -> Any:
        from sglang.srt.layers.dp_attention import set_dp_buffer_len, set_is_extend_in_batch
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with forward_context(ForwardContext(attn_backend=stage.backend)):
            set_dp_buffer_len(None, batch.batch_size, self._padding_mode.is_max_len(), None)
            set_is_extend_in_batch(False)
            # Planned as a plain batch: backends would look for SGLang's own draft loop behind a draft input.
            stage.backend.init_forward_metadata_in_graph(batch)
            batch.spec_info = spec_info
            return self._runner.model.forward(batch.input_ids, batch.positions, batch)

    def _slots(self, rows: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """KV slots of the tokens that a step feeds, ``[R] int64``."""
        return self._table[rows, lens - 1].to(torch.int64)

    def _forward_batch(self, rows, lens, lens_cpu, ids, slots, positions) -> Any:
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(rows),
            input_ids=ids,
            req_pool_indices=rows,
            seq_lens=lens,
            out_cache_loc=slots,
            seq_lens_sum=None if lens_cpu is None else int(lens_cpu.sum()),
            seq_lens_cpu=lens_cpu,
            positions=positions,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            dp_padding_mode=self._padding_mode,
            spec_algorithm=self._runner.spec_algorithm,
        )

    def _step_batch(self, columns: Any, stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and lengths of a step, of columns on the host or on the device."""
        return step_batch(columns, stage.step, stage.width)

    def _plan(self, size: int, stage: Stage, *, in_capture: bool = False) -> None:
        """Let a step's backend prepare for the columns of this size (host and device copy agree)."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        rows, lens = self._step_batch(self._static[size], stage)
        lens_cpu = self._step_batch(self._host[size], stage)[1]
        # Which tokens are fed at which positions does not matter; where they are written does to sliding windows only.
        slots = self._slots(rows, lens) if self._sliding_window else None
        batch = self._forward_batch(rows, lens, lens_cpu, rows, slots, positions=rows)
        with forward_context(ForwardContext(attn_backend=stage.backend)):
            stage.backend.init_forward_metadata_out_graph(batch, in_capture=in_capture)

    # --- replay ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, count: int, fill: Fill, width: int) -> tuple[Chain, Kinds]:
        """Draft for the ``count`` requests that ``fill`` writes down, each of which misses ``width`` tokens at most.

        The chain's tensors are the graphs' own, valid until the next run; it may have padding rows at the end.
        """
        size = self._size_for(count)
        host, static = self._host[size], self._static[size]
        kinds = fill(host)
        static.copy_(host)
        return self._replay(size, kinds, width), kinds

    @torch.inference_mode()
    def feed_last(self, count: int) -> None:
        """Feed the last drafts of the chain that ran last, for ``count`` requests."""
        size = self._size_for(count)
        self._play(size, VARIANTS[0], self._stages[-1])

    def _size_for(self, count: int) -> int:
        return next(size for size in self._buckets if size >= count)

    def _replay(self, size: int, kinds: Kinds, width: int) -> Chain:
        """Run the chain of this size over what stands in its columns."""
        variant = variant_for(kinds)
        if variant.sampled:
            self._uniforms.uniform_(generator=self._generator)
        for stage in self._stages:
            if self._draws(stage) and (stage.step or stage.width == width):
                self._play(size, variant, stage)
        return self._chains[size]

    def _play(self, size: int, variant: Kinds, stage: Stage) -> None:
        self._plan(size, stage)
        stage.graphs[size, variant].replay()
