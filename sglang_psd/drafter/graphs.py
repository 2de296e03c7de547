"""A whole chain as one CUDA graph per batch size.

The catch-up, the k decode steps, sampling and the sparse laws are one replay: between two steps the host has nothing to
do. Attention takes SGLang's own backends, one instance per step, through the contract that its draft runners use
(``sglang/srt/layers/attention/base_attn_backend.py``): metadata that needs the host is written before the replay.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from sglang_psd.drafter.chain import Chain, first_batch, run_chain
from sglang_psd.drafter.columns import Columns, Kinds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_psd.drafter.rows import DraftState
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
        self._padding_mode = DpPaddingMode.get_default_mode_in_cuda_graph()
        self._buckets = chain_buckets(spec.max_requests)
        largest = self._buckets[-1]
        self._host = {size: self._columns(size, "cpu", pinned=True) for size in self._buckets}
        self._static = {size: self._columns(size, runner.device) for size in self._buckets}
        self._uniforms = torch.zeros(spec.num_steps, largest, dtype=torch.float64, device=runner.device)
        self._backends = self._build_backends(largest)
        self._graphs: dict[tuple[int, Kinds], tuple[torch.cuda.CUDAGraph, Chain]] = {}
        self._capture()
        logger.info("Captured %d draft chains in %.1f s.", len(self._graphs), time.monotonic() - started)

    # Times that each request stands in the first step.
    _first_width = 2

    def _columns(self, size: int, device: str, *, pinned: bool = False) -> Any:
        return Columns.empty(size, device, pinned=pinned)

    def _build_backends(self, largest: int) -> list[Any]:
        from sglang.srt.model_executor.model_runner_components.attention_backend_setup import get_attention_backend

        backends = []
        for step in range(self._spec.num_steps):
            backend = get_attention_backend(model_runner=self._runner)
            most = self._first_width * largest if step == 0 else largest
            backend.init_cuda_graph_state(most, most)
            backends.append(backend)
        return backends

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
                    # One plan for all variants: a backend keeps one set of buffers per batch size.
                    self._plan(size, in_capture=True)
                    for kinds in VARIANTS:
                        self._graphs[size, kinds] = self._capture_one(size, kinds, pool, context.stream)
        except RuntimeError as error:
            raise RuntimeError(f"Capturing the draft chain failed: {error}\n{CUDA_GRAPH_CAPTURE_FAILED_MSG}") from error

    def _capture_one(self, size: int, kinds: Kinds, pool: Any, stream: Any) -> tuple[torch.cuda.CUDAGraph, Chain]:
        torch.cuda.synchronize()
        self._chain(size, kinds)  # loads kernels and pays their one-time costs outside the graph
        for backend in self._backends:
            backend.on_after_cuda_graph_warmup()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            result = self._chain(size, kinds)
        return graph, result

    def _chain(self, size: int, kinds: Kinds) -> Chain:
        return run_chain(
            self._decode,
            self._static[size],
            kinds,
            self._uniforms[:, :size] if kinds.sampled else None,
            self._spec.num_steps,
            self._spec.vocab_limit,
            self._spec.top_m,
        )

    def _decode(self, step: int, rows: torch.Tensor, lens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        from sglang.srt.layers.dp_attention import set_dp_buffer_len, set_is_extend_in_batch
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        batch = self._forward_batch(rows, lens, None, ids)
        backend = self._backends[step]
        with forward_context(ForwardContext(attn_backend=backend)):
            set_dp_buffer_len(None, len(rows), self._padding_mode.is_max_len(), None)
            set_is_extend_in_batch(False)
            backend.init_forward_metadata_in_graph(batch)
            return self._runner.model.forward(batch.input_ids, batch.positions, batch).next_token_logits

    def _forward_batch(self, rows, lens, lens_cpu, ids) -> Any:
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(rows),
            input_ids=ids,
            req_pool_indices=rows,
            seq_lens=lens,
            out_cache_loc=self._table[rows, lens - 1].to(torch.int64),
            seq_lens_sum=None if lens_cpu is None else int(lens_cpu.sum()),
            seq_lens_cpu=lens_cpu,
            positions=lens - 1,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            dp_padding_mode=self._padding_mode,
            spec_algorithm=self._runner.spec_algorithm,
        )

    def _plan(self, size: int, *, in_capture: bool = False) -> None:
        """Let each step's backend prepare for the columns of this size (host and device copy agree)."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        device, host = self._static[size], self._host[size]
        rows, lens, ids = first_batch(device)
        lens_cpu = first_batch(host)[1]
        for step, backend in enumerate(self._backends):
            if step == 1:
                rows, lens, ids, lens_cpu = device.rows, device.lens, device.last, host.lens
            batch = self._forward_batch(rows, lens + step, lens_cpu + step, ids)
            with forward_context(ForwardContext(attn_backend=backend)):
                backend.init_forward_metadata_out_graph(batch, in_capture=in_capture)

    # --- replay ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, states: Sequence[DraftState]) -> tuple[Chain, Kinds]:
        """Draft for the given requests; tensors of the result are the graph's own, valid until the next replay."""
        size = next(size for size in self._buckets if size >= len(states))
        host, static = self._host[size], self._static[size]
        kinds = host.fill(states)
        static.ints.copy_(host.ints, non_blocking=True)
        static.floats.copy_(host.floats, non_blocking=True)
        return self._replay(size, kinds), kinds

    def _replay(self, size: int, kinds: Kinds) -> Chain:
        """Run the chain of this size over what stands in its columns."""
        variant = variant_for(kinds)
        if variant.sampled:
            self._uniforms.uniform_(generator=self._generator)
        self._plan(size)
        graph, chain = self._graphs[size, variant]
        graph.replay()
        return chain
