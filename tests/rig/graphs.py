"""The drafter's graphs without a GPU: all of their code but capture and replay.

A "graph" runs the device's part of its step again, over the same static tensors. The attention backend is the CPU's;
its stand-in checks what a GPU's would rely on: that the lengths planned on the host are those on the device, and that
what kernels read without strides is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec


class _Replay:
    def __init__(self, run: Callable[[], None]):
        self.replay = run


class _CheckedBackend:
    """An attention backend as ``ChainGraphs`` uses it; everything else is the real one's."""

    def __init__(self, real: Any):
        self._real = real
        self._planned: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        assert batch.req_pool_indices.is_contiguous() and batch.seq_lens.is_contiguous()
        self._planned = batch.seq_lens_cpu.tolist()
        assert batch.seq_lens_sum == sum(self._planned)

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        for tensor in (batch.req_pool_indices, batch.seq_lens, batch.input_ids, batch.positions, batch.out_cache_loc):
            assert tensor.stride() == (1,), tensor.stride()
        assert batch.seq_lens.tolist() == self._planned, "planned on the host for other lengths"


def graphs_on_cpu() -> None:
    """Let the drafter of this process draft through ``ChainGraphs`` or ``HeadGraphs``."""
    from sglang_psd.drafter import graphs, head_graphs, serve

    def make_stage(self: Any, step: int, width: int, largest: int) -> graphs.Stage:
        return graphs.Stage(step, width, _CheckedBackend(self._runner.attn_backend))

    def capture(self: Any) -> None:
        for size in self._buckets:
            for stage in self._stages:
                for kinds in graphs.VARIANTS if self._draws(stage) else graphs.VARIANTS[:1]:
                    run = lambda size=size, kinds=kinds, stage=stage: self._run_stage(size, kinds, stage)  # noqa: E731
                    stage.graphs[size, kinds] = _Replay(run)

    graphs.ChainGraphs._make_stage = make_stage
    graphs.ChainGraphs._capture = capture
    for owner in (graphs.ChainGraphs, head_graphs.HeadGraphs):
        columns = owner._columns
        # Pinned memory needs a GPU.
        owner._columns = lambda self, size, device, *, pinned=False, columns=columns: columns(self, size, device)
    make_engine = serve.make_engine
    serve.make_engine = lambda spec: make_engine(msgspec.structs.replace(spec, cuda_graphs=True))
