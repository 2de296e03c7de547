"""The draft model on its own device: prefill, catch-up and the k-step loop.

SGLang's ``TpModelWorker`` loads and runs the model, with its own pools and CUDA graphs, but without scheduler,
requests or tree cache: this module hands it raw ``ForwardBatch`` objects. One row of the request table per open
request. Rolling back costs nothing: wrong drafts are overwritten in place.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_psd.channel.messages import PROB, SCHEMA_VERSION, TOKEN, Close, Hello, Open, Proposals, RoundRow, Stats
from sglang_psd.drafter.proposals import ProposalSampler
from sglang_psd.drafter.rows import DraftState
from sglang_psd.drafter.spec import DrafterSpec

logger = logging.getLogger(__name__)

# Most prompt tokens of one prefill forward: rounds are served in between.
PREFILL_CHUNK = 4096
# Up to this many missing tokens are caught up by decode steps, which replay a CUDA graph.
CATCH_UP_STEPS = 2


@dataclass
class _Drafts:
    """Result of one k-step loop, still on the device."""

    tokens: torch.Tensor  # [R, K] int64
    law_ids: torch.Tensor | None  # [S, K, M] int64
    law_probs: torch.Tensor | None  # [S, K, M] float32
    sampled: list[int]


class DraftEngine:
    """Loads the draft model and drafts.

    Parameters
    ----------
    spec : DrafterSpec

    Raises
    ------
    RuntimeError, ValueError, OSError
        From SGLang, when the model cannot be loaded or its KV pool does not fit.
    """

    def __init__(self, spec: DrafterSpec):
        started = time.monotonic()
        self.spec = spec
        self._worker = _load_worker(spec)
        self._runner = self._worker.model_runner
        self._table, self._allocator = self._worker.get_memory_pool()
        self._device = self._runner.device
        self.context_len = int(self._runner.model_config.context_len)
        self._states: dict[str, DraftState] = {}
        self._free_rows = list(range(spec.max_requests, 0, -1))  # row 0 is the pool's padding row
        self._generator = torch.Generator(device=self._device).manual_seed(spec.random_seed)
        self._kv_tokens = int(self._allocator.available_size())
        self._rounds = 0
        self._drafted_tokens = 0
        self.load_s = time.monotonic() - started

    # --- requests -------------------------------------------------------------------------------

    def open(self, message: Open) -> None:
        """Take over a request; a known id is replaced. Its KV is built when there is time."""
        self.close(Close([message.rid]))
        tokens = np.frombuffer(message.tokens, TOKEN).tolist()
        self._states[message.rid] = DraftState(message.rid, message.sampling, tokens)

    def close(self, message: Close) -> None:
        """Forget requests and free their KV; unknown ids are ignored."""
        for rid in message.rids:
            state = self._states.pop(rid, None)
            if state is not None:
                self._release(state)

    def backlog(self, rid: str) -> int:
        """Tokens of ``rid`` that still need KV, beyond what a round catches up by itself."""
        state = self._states.get(rid)
        return 0 if state is None else max(0, state.missing - CATCH_UP_STEPS)

    def prefill_some(self) -> bool:
        """Build KV of one batch of waiting requests; False when nothing is left to do."""
        waiting = [s for s in self._states.values() if s.missing > CATCH_UP_STEPS and self._usable(s, 0)]
        if not waiting:
            return False
        return self._extend(waiting, PREFILL_CHUNK)

    # --- drafting -------------------------------------------------------------------------------

    @torch.inference_mode()
    def draft(self, round_id: int, rows: Sequence[RoundRow], num_steps: int, received_s: float) -> Proposals:
        """Commit the rows' new tokens and draft ``num_steps`` tokens for each.

        A row that cannot be served (unknown, out of step, context or pool exhausted) gets no drafts; the others are not
        affected.
        """
        started = time.monotonic()
        ready: list[DraftState] = []
        for row in rows:
            state = self._states.get(row.rid)
            if state is not None and not state.commit(row.new_tokens, row.base_len):
                self.close(Close([row.rid]))
                state = None
            if state is not None and self._usable(state, num_steps) and self._catch_up(state):
                ready.append(state)
        ready = [state for state in ready if self._reserve(state, len(state.tokens) + num_steps - 1)]
        drafts = self._draft_chain(ready, num_steps) if ready and num_steps else None
        return self._pack(round_id, rows, ready, drafts, num_steps, received_s, started)

    def _usable(self, state: DraftState, num_steps: int) -> bool:
        return len(state.tokens) + num_steps <= self.context_len

    def _catch_up(self, state: DraftState) -> bool:
        """Feed what is missing by more than a decode step can take; False when the pool is full."""
        while state.missing > CATCH_UP_STEPS:
            if not self._extend([state], PREFILL_CHUNK):
                return False
        return True

    def _draft_chain(self, states: list[DraftState], num_steps: int) -> _Drafts:
        late = [state for state in states if state.missing == CATCH_UP_STEPS]
        if late:
            self._decode(*self._decode_inputs(late, -2))
            for state in late:
                state.fed.append(state.tokens[-2])
        sampler = ProposalSampler([s.sampling for s in states], self.spec.top_m, self._device, self._generator)
        rows, lens_cpu, lens, ids = self._decode_inputs(states, -1)
        tokens, laws = [], []
        for step in range(num_steps):
            logits = self._decode(rows, lens_cpu + step, lens + step, ids)
            ids, law_ids, law_probs = sampler.draw(logits[:, : self.spec.vocab_limit], lens + step)
            tokens.append(ids)
            laws.append((law_ids, law_probs))
        stacked = torch.stack(tokens, dim=1)
        if not sampler.sampled:
            return _Drafts(stacked, None, None, [])
        return _Drafts(
            stacked,
            torch.stack([law[0] for law in laws], dim=1),
            torch.stack([law[1] for law in laws], dim=1),
            sampler.sampled,
        )

    def _pack(self, round_id, rows, ready, drafts: _Drafts | None, num_steps, received_s, started_s) -> Proposals:
        """Copy drafts to the host, note which tokens now have KV, and build the message."""
        index = {state.rid: i for i, state in enumerate(ready)}
        tokens = np.zeros((len(rows), num_steps), TOKEN)
        counts, sampled = [0] * len(rows), []
        law_ids, law_probs = np.zeros(0, TOKEN), np.zeros(0, PROB)
        if drafts is not None:
            host = drafts.tokens.cpu().numpy()
            law_row = {row: i for i, row in enumerate(drafts.sampled)}
            picked = []
            for i, row in enumerate(rows):
                at = index.get(row.rid)
                if at is None:
                    continue
                tokens[i], counts[i] = host[at], num_steps
                ready[at].fed = [*ready[at].tokens, *host[at, :-1].tolist()]
                if at in law_row:
                    sampled.append(i)
                    picked.append(law_row[at])
            if drafts.law_ids is not None and drafts.law_probs is not None:
                law_ids = drafts.law_ids.cpu().numpy()[picked].astype(TOKEN)
                law_probs = drafts.law_probs.cpu().numpy()[picked].astype(PROB)
        self._rounds += 1
        self._drafted_tokens += sum(counts)
        return Proposals(
            round_id=round_id,
            rids=[row.rid for row in rows],
            base_lens=[row.base_len for row in rows],
            counts=counts,
            num_steps=num_steps,
            tokens=tokens.tobytes(),
            sampled=sampled,
            top_m=law_ids.shape[-1] if sampled else 0,
            law_ids=law_ids.tobytes(),
            law_probs=law_probs.tobytes(),
            received_s=received_s,
            started_s=started_s,
            finished_s=time.monotonic(),
        )

    # --- KV -------------------------------------------------------------------------------------

    def _reserve(self, state: DraftState, length: int) -> bool:
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

    def _release(self, state: DraftState) -> None:
        if state.num_slots:
            slots = self._table.req_to_token[state.pool_row, : state.num_slots].clone()
            self._allocator.free(slots.to(torch.int64))
        if state.pool_row >= 0:
            self._free_rows.append(state.pool_row)
        state.pool_row, state.num_slots = -1, 0
        state.fed.clear()

    # --- forwards -------------------------------------------------------------------------------

    @torch.inference_mode()
    def _extend(self, states: list[DraftState], budget: int) -> bool:
        """Prefill all but the last committed token of the given requests, ``budget`` tokens at most."""
        chosen: list[tuple[DraftState, int]] = []
        for state in states:
            take = min(state.missing - 1, budget)
            if take <= 0 or not self._reserve(state, len(state.fed) + take):
                continue
            chosen.append((state, take))
            budget -= take
        if not chosen:
            return False
        prefix = [len(state.fed) for state, _ in chosen]
        takes = [take for _, take in chosen]
        ids = [t for state, take in chosen for t in state.tokens[len(state.fed) : len(state.fed) + take]]
        self._forward_extend([s.pool_row for s, _ in chosen], ids, prefix, takes)
        for state, take in chosen:
            state.fed.extend(state.tokens[len(state.fed) : len(state.fed) + take])
        return True

    def _forward_extend(self, pool_rows: list[int], ids: list[int], prefix: list[int], takes: list[int]) -> None:
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

        rows = torch.tensor(pool_rows, dtype=torch.int64).to(self._device)
        lens_cpu = torch.tensor([p + t for p, t in zip(prefix, takes)], dtype=torch.int64)
        positions = torch.cat([torch.arange(p, p + t) for p, t in zip(prefix, takes)]).to(self._device)
        owner = torch.repeat_interleave(rows, torch.tensor(takes).to(self._device))
        starts = np.concatenate([[0], np.cumsum(takes)[:-1]])
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(pool_rows),
            input_ids=torch.tensor(ids, dtype=torch.int64).to(self._device),
            req_pool_indices=rows,
            seq_lens=lens_cpu.to(self._device),
            out_cache_loc=self._table.req_to_token[owner, positions].to(torch.int64),
            seq_lens_sum=int(lens_cpu.sum()),
            seq_lens_cpu=lens_cpu,
            positions=positions,
            extend_num_tokens=len(ids),
            extend_seq_lens=torch.tensor(takes, dtype=torch.int32).to(self._device),
            extend_prefix_lens=torch.tensor(prefix, dtype=torch.int32).to(self._device),
            extend_start_loc=torch.tensor(starts, dtype=torch.int32).to(self._device),
            extend_seq_lens_cpu=takes,
            extend_prefix_lens_cpu=prefix,
            extend_logprob_start_lens_cpu=takes,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
            spec_algorithm=self._runner.spec_algorithm,
            num_token_non_padded_cpu=len(ids),
        )
        self._runner.forward(batch)

    def _decode_inputs(
        self, states: list[DraftState], last: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs of a decode that feeds token ``last`` (-1 or -2) of each request.

        Returns rows ``[R]``, lengths on host and device ``[R]`` (the fed token included) and token ids ``[R]``, all
        int64, in one copy to the device.
        """
        table = [[s.pool_row, len(s.tokens) + last + 1, s.tokens[last]] for s in states]
        host = torch.tensor(table, dtype=torch.int64).T.contiguous()
        pinned = host if self._device == "cpu" else host.pin_memory()
        rows, lens, ids = pinned.to(self._device, non_blocking=True)
        return rows, host[1], lens, ids

    def _decode(
        self, rows: torch.Tensor, lens_cpu: torch.Tensor, lens: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Feed one token per row; ``lens`` ``[R]`` include it. Returns logits ``[R, V]``."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

        positions = lens - 1
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(rows),
            input_ids=ids,
            req_pool_indices=rows,
            seq_lens=lens,
            out_cache_loc=self._table.req_to_token[rows, positions].to(torch.int64),
            seq_lens_sum=int(lens_cpu.sum()),
            seq_lens_cpu=lens_cpu,
            positions=positions,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
            spec_algorithm=self._runner.spec_algorithm,
            num_token_non_padded_cpu=len(rows),
        )
        return self._runner.forward(batch).logits_output.next_token_logits

    # --- reports --------------------------------------------------------------------------------

    def hello(self, pid: int) -> Hello:
        """First message to the scheduler."""
        return Hello(
            schema_version=SCHEMA_VERSION,
            pid=pid,
            device=self.spec.device_label,
            vocab_size=int(self._runner.model_config.vocab_size),
            context_len=self.context_len,
            kv_tokens=self._kv_tokens,
            max_requests=self.spec.max_requests,
            weight_gb=float(self._runner.weight_load_mem_usage or 0.0),
            kv_gb=float(self._allocator.get_kvcache().mem_usage),
            load_s=self.load_s,
        )

    def stats(self, ping_id: int) -> Stats:
        """Accounting: with no request open, every KV slot must be free."""
        return Stats(
            ping_id=ping_id,
            open_requests=len(self._states),
            free_kv_tokens=int(self._allocator.available_size()),
            kv_tokens=self._kv_tokens,
            rounds=self._rounds,
            drafted_tokens=self._drafted_tokens,
        )


def _load_worker(spec: DrafterSpec) -> Any:
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
