"""The draft model and its pools, driven by raw batches.

SGLang's ``TpModelWorker`` loads and runs the model, with its own pools and CUDA graphs, but without scheduler,
requests or tree cache: this module hands it ``ForwardBatch`` objects. One row of the request table per open request.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import torch

from sglang_psd.drafter.rows import DraftState
from sglang_psd.drafter.spec import DrafterSpec
from sglang_psd.transfer import to_device


class DraftModel:
    """Loads the draft checkpoint; feeds tokens and returns logits.

    Parameters
    ----------
    spec : DrafterSpec

    Raises
    ------
    RuntimeError, ValueError, OSError
        From SGLang, when the model cannot be loaded or its KV pool does not fit.
    """

    def __init__(self, spec: DrafterSpec):
        worker = load_worker(spec)
        self._runner = worker.model_runner
        self._table, self._allocator = worker.get_memory_pool()
        self._free_rows = list(range(spec.max_requests, 0, -1))  # row 0 is the pool's padding row
        self.device: str = self._runner.device
        self.context_len = int(self._runner.model_config.context_len)
        self.vocab_size = int(self._runner.model_config.vocab_size)
        self.kv_tokens = self.free_kv_tokens
        self.weight_gb = float(self._runner.weight_load_mem_usage or 0.0)
        self.kv_gb = float(self._allocator.get_kvcache().mem_usage)

    @property
    def free_kv_tokens(self) -> int:
        """KV slots that no request holds."""
        return int(self._allocator.available_size())

    # --- KV -------------------------------------------------------------------------------------

    def reserve(self, state: DraftState, length: int) -> bool:
        """Make sure that positions below ``length`` have KV slots; False when there are none left."""
        if state.pool_row < 0:
            if not self._free_rows:
                return False
            state.pool_row = self._free_rows.pop()
        needed = length - state.num_slots
        if needed <= 0:
            return True
        slots = self._allocator.alloc(needed)
        if slots is None:
            return False
        table = self._table.req_to_token
        table[state.pool_row, state.num_slots : length] = slots.to(table.dtype)
        state.num_slots = length
        return True

    def release(self, state: DraftState) -> None:
        """Give a request's row and slots back."""
        if state.num_slots:
            slots = self._table.req_to_token[state.pool_row, : state.num_slots].clone()
            self._allocator.free(slots.to(torch.int64))
        if state.pool_row >= 0:
            self._free_rows.append(state.pool_row)
        state.pool_row, state.num_slots = -1, 0
        state.fed.clear()

    # --- forwards -------------------------------------------------------------------------------

    def extend(self, pool_rows: list[int], ids: list[int], prefix: list[int], takes: list[int]) -> None:
        """Feed ``takes[i]`` tokens to row ``pool_rows[i]`` after its first ``prefix[i]``; the logits are not wanted."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        rows = torch.tensor(pool_rows, dtype=torch.int64).to(self.device)
        lens_cpu = torch.tensor([p + t for p, t in zip(prefix, takes)], dtype=torch.int64)
        starts = np.concatenate([[0], np.cumsum(takes)[:-1]])
        self._forward(
            ForwardMode.EXTEND,
            rows,
            lens_cpu,
            lens_cpu.to(self.device),
            torch.tensor(ids, dtype=torch.int64).to(self.device),
            positions=torch.cat([torch.arange(p, p + t) for p, t in zip(prefix, takes)]).to(self.device),
            owners=torch.repeat_interleave(rows, torch.tensor(takes).to(self.device)),
            extend_num_tokens=len(ids),
            extend_seq_lens=torch.tensor(takes, dtype=torch.int32).to(self.device),
            extend_prefix_lens=torch.tensor(prefix, dtype=torch.int32).to(self.device),
            extend_start_loc=torch.tensor(starts, dtype=torch.int32).to(self.device),
            extend_seq_lens_cpu=takes,
            extend_prefix_lens_cpu=prefix,
            extend_logprob_start_lens_cpu=takes,
        )

    def decode_inputs(
        self, states: list[DraftState], last: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs of a decode that feeds token ``last`` (-1 or -2) of each request.

        Returns rows ``[R]``, lengths on host and device ``[R]`` (the fed token included) and token ids ``[R]``, all
        int64, in one copy to the device.
        """
        table = [[s.pool_row, len(s.tokens) + last + 1, s.tokens[last]] for s in states]
        host = torch.tensor(table, dtype=torch.int64).T.contiguous()
        rows, lens, ids = to_device(host, self.device)
        return rows, host[1], lens, ids

    def decode(self, rows: torch.Tensor, lens_cpu: torch.Tensor, lens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Feed one token per row; ``lens`` ``[R]`` include it. Returns logits ``[R, V]``."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        return self._forward(ForwardMode.DECODE, rows, lens_cpu, lens, ids, positions=lens - 1, owners=rows)

    def _forward(self, mode, rows, lens_cpu, lens, ids, *, positions, owners, **extend) -> torch.Tensor:
        """Run one batch; ``positions`` and ``owners`` say where in which row of the table each of ``ids`` stands."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=ids,
            req_pool_indices=rows,
            seq_lens=lens,
            out_cache_loc=self._table.req_to_token[owners, positions].to(torch.int64),
            seq_lens_sum=int(lens_cpu.sum()),
            seq_lens_cpu=lens_cpu,
            positions=positions,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
            spec_algorithm=self._runner.spec_algorithm,
            num_token_non_padded_cpu=len(ids),
            **extend,
        )
        return self._runner.forward(batch).logits_output.next_token_logits


def load_worker(spec: DrafterSpec) -> Any:
    """Build SGLang's worker for the draft model, as a plain model in a world of its own."""
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    if spec.device == "cpu":
        from sglang_psd.cpu.defaults import share_cores

        share_cores()
    args: dict[str, Any] = {
        "model_path": spec.model_path,
        "revision": spec.revision,
        "load_format": spec.load_format,
        "quantization": spec.quantization,
        "trust_remote_code": spec.trust_remote_code,
        "context_length": spec.context_length,
        "device": spec.device,
        "dtype": spec.dtype,
        "attention_backend": spec.attention_backend,
        "max_running_requests": spec.max_requests,
        "max_total_tokens": spec.kv_tokens,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": not spec.cuda_graphs,
        "enable_deterministic_inference": spec.deterministic,
        "page_size": 1,
        "random_seed": spec.random_seed,
        "log_level": spec.log_level,
    }
    if spec.device != "cpu":
        args["mem_fraction_static"] = spec.mem_fraction
        args["cuda_graph_max_bs_decode"] = spec.max_requests
    server_args = ServerArgs(**args)
    publish(server_args, role="scheduler")
    # A world of one meets in a file: a port that is free now may be taken by the target a moment later.
    with tempfile.TemporaryDirectory(prefix="sglang-psd-") as folder:
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder}/world"
        worker = TpModelWorker(server_args=server_args, gpu_id=0, ps=ParallelState.trivial(), nccl_port=0)
        worker.alloc_memory_pool()
        worker.init_attention_backends()
        worker.init_cuda_graphs()
    return worker
