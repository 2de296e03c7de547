"""The draft model and its pools, driven by raw batches.

SGLang's ``TpModelWorker`` loads and runs the model, with its own pools and CUDA graphs, but without scheduler,
requests or tree cache: this module hands it ``ForwardBatch`` objects. One row of the request table per open request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_psd.drafter.chain import CATCH_UP, Chain, HostChain, run_step, step_batch
from sglang_psd.drafter.columns import Columns, Fill, Kinds
from sglang_psd.drafter.graphs import ChainGraphs
from sglang_psd.drafter.loading import load_worker
from sglang_psd.drafter.rows import DraftState, Pooled
from sglang_psd.drafter.spec import DrafterSpec
from sglang_psd.transfer import to_device


@dataclass
class _EagerChain:
    """A chain that is run step by step, without graphs."""

    columns: Columns
    on_device: Columns
    chain: Chain
    kinds: Kinds
    uniforms: torch.Tensor | None


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
        worker = self._load_worker(spec)
        self._spec = spec
        self._weights_path = spec.model_path
        self._runner = worker.model_runner
        self._table, self._allocator = worker.get_memory_pool()
        self._num_rows = spec.max_requests
        self._free_rows = list(range(spec.max_requests, 0, -1))  # row 0 is the pool's padding row
        self.device: str = self._runner.device
        self._generator = torch.Generator(device=self.device).manual_seed(spec.random_seed)
        self._graphs = ChainGraphs(self._runner, spec, self._generator) if spec.cuda_graphs else None
        self._eager: _EagerChain | None = None
        self.context_len = int(self._runner.model_config.context_len)
        self.vocab_size = int(self._runner.model_config.vocab_size)
        self.kv_tokens = self.free_kv_tokens
        self.weight_gb = float(self._runner.weight_load_mem_usage or 0.0)
        self.kv_gb = float(self._allocator.get_kvcache().mem_usage)

    def _load_worker(self, spec: DrafterSpec) -> Any:
        return load_worker(spec)

    @property
    def free_kv_tokens(self) -> int:
        """KV slots that no request holds."""
        return int(self._allocator.available_size())

    def load_weights(self, path: str) -> str | None:
        """Take the weights of another checkpoint of this shape, in place; says why not, if not."""
        problem = self._update_from(path)
        if problem is None:
            self._weights_path = path
        elif self._update_from(self._weights_path) is not None:
            # SGLang's own way back reads the new checkpoint once more.
            raise RuntimeError(f"the old weights could not be loaded again after: {problem}")
        return problem

    def _update_from(self, path: str) -> str | None:
        try:
            updater = self._runner.weight_updater
            success, message = updater.update_weights_from_disk(path, self._spec.load_format or "auto")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None if success else message

    # --- KV -------------------------------------------------------------------------------------

    def reserve_all(self, states: Sequence[Pooled], lengths: Sequence[int]) -> list[bool]:
        """Make sure that positions of each request below its length have KV slots; says for whom there was room."""
        granted = [state.pool_row >= 0 or (bool(self._free_rows) and self._take_row(state)) for state in states]
        free, growth = self.free_kv_tokens, []
        for i, (state, length) in enumerate(zip(states, lengths)):
            needed = max(0, length - state.num_slots) if granted[i] else 0
            if needed > free:
                granted[i], needed = False, 0
            free -= needed
            growth.append(needed)
        total = sum(growth)
        if not total:
            return granted
        slots = self._allocator.alloc(total)
        where = np.empty((2, total), dtype=np.int64)
        start = 0
        for state, needed in zip(states, growth):
            where[0, start : start + needed] = state.pool_row
            where[1, start : start + needed] = np.arange(state.num_slots, state.num_slots + needed)
            start, state.num_slots = start + needed, state.num_slots + needed
        rows, positions = to_device(torch.from_numpy(where), self.device)
        table = self._table.req_to_token
        table[rows, positions] = slots.to(table.dtype)
        return granted

    def _take_row(self, state: Pooled) -> bool:
        state.pool_row = self._free_rows.pop()
        return True

    def trim(self, state: Pooled, length: int) -> bool:
        """Give the slots of positions from ``length`` on back; False when there are none."""
        if state.num_slots <= length:
            return False
        slots = self._table.req_to_token[state.pool_row, length : state.num_slots].clone()
        self._allocator.free(slots.to(torch.int64))
        state.num_slots = length
        return True

    def release(self, state: Pooled) -> None:
        """Give a request's row and slots back."""
        self.trim(state, 0)
        if state.pool_row >= 0:
            self._free_rows.append(state.pool_row)
        state.forget_kv()

    def fault(self, states: Sequence[Pooled]) -> str | None:
        """What is wrong when ``states`` are all that hold rows and slots; None when nothing is."""
        held, free = sum(state.num_slots for state in states), self.free_kv_tokens
        if held + free != self.kv_tokens:
            return f"{held} KV tokens are held and {free} are free, of {self.kv_tokens}"
        rows = [state.pool_row for state in states if state.pool_row >= 0]
        if sorted([*rows, *self._free_rows]) != list(range(1, self._num_rows + 1)):
            return f"{len(rows)} request rows are held and {len(self._free_rows)} are free, of {self._num_rows}"
        for state in states:
            if not state.num_fed <= state.num_slots or (state.num_slots and state.pool_row < 0):
                return f"{state.rid} has {state.num_fed} tokens in {state.num_slots} slots of row {state.pool_row}"
        return None

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

    def draft_chain(self, states: Sequence[DraftState], num_steps: int) -> HostChain:
        """Draft ``num_steps`` tokens for each request; catches up one or two committed tokens on the way.

        KV below ``len(tokens) + num_steps - 1`` must have been reserved.
        """
        width = 1 if all(state.missing == 1 for state in states) else CATCH_UP
        return self.draft_laid_out(len(states), lambda columns: columns.fill(states), width, num_steps)

    @torch.inference_mode()
    def draft_laid_out(
        self, count: int, fill: Fill, width: int, num_steps: int, meanwhile: Callable[[], None] = lambda: None
    ) -> HostChain:
        """As ``draft_chain``, for the ``count`` requests that ``fill`` writes down.

        Each of them misses ``width`` tokens at most; ``meanwhile`` is called while the device works.
        """
        if self._graphs is not None and num_steps == self._spec.num_steps:
            chain, kinds = self._graphs.run(count, fill, width)
        else:
            columns = Columns.empty(count, "cpu")
            kinds = fill(columns)
            self._eager = _EagerChain(
                columns,
                columns.on(self.device),
                Chain.empty(num_steps, count, min(self._spec.top_m, self._spec.vocab_limit), self.device),
                kinds,
                self._draw_uniforms(kinds, num_steps, count),
            )
            for step in range(num_steps):
                self._run_step(self._eager, step, width if step == 0 else 1)
            chain = self._eager.chain
        meanwhile()
        return chain.to_host(kinds, count)

    @torch.inference_mode()
    def feed_last(self, count: int, num_steps: int) -> None:
        """Feed the last drafts of the chain just drafted for ``count`` requests; no slot may have been given to
        another request in between.

        KV below ``len(tokens) + num_steps`` must have been reserved.
        """
        if self._graphs is not None and num_steps == self._spec.num_steps:
            self._graphs.feed_last(count)
        elif self._eager is not None:
            self._run_step(self._eager, num_steps, 1)

    def _run_step(self, eager: _EagerChain, step: int, width: int) -> None:
        lens_cpu = step_batch(eager.columns, step, width)[1]

        def decode(rows: torch.Tensor, lens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return self._decode(rows, lens_cpu, lens, ids)

        limit = self._spec.vocab_limit
        run_step(decode, eager.on_device, eager.chain, eager.kinds, eager.uniforms, step, width, limit)

    def _draw_uniforms(self, kinds: Kinds, num_steps: int, count: int) -> torch.Tensor | None:
        if not kinds.sampled:
            return None
        shape = (num_steps, count)
        return torch.rand(shape, dtype=torch.float64, device=self.device, generator=self._generator)

    def _decode(self, rows, lens_cpu, lens, ids) -> torch.Tensor:
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
