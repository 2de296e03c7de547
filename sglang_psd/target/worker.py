"""The target side of a round, as SGLang's scheduler calls it.

Implements the V2 worker contract (``sglang/srt/speculative/base_spec_worker.py``) without a draft worker:
drafts come from another process and are handed over by ``stage`` before each verify. Nothing in here waits
for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_psd.channel.messages import DraftRow
from sglang_psd.hooks import verify_applied
from sglang_psd.target.acceptance import (
    Filters,
    VerifyRows,
    accept_chain,
    filtered_probs,
    target_choice,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

logger = logging.getLogger(__name__)


def needs_plain_step(req: Req) -> bool:
    """Whether a request's law at later positions depends on what is accepted at earlier ones.

    Penalties, grammars and custom logit processors are SGLang's own code for one token at a time. Such a
    request takes part in every round without drafts: one exact token per round.
    """
    params = req.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
        or req.grammar is not None
        or req.custom_logit_processor
    )


def is_greedy(req: Req) -> bool:
    """SGLang normalises temperature 0 to ``top_k == 1``."""
    return req.sampling_params.top_k <= 1


def default_seed(server_args) -> int | None:
    """Seed of requests that bring none: 42 under ``--enable-deterministic-inference``, as in SGLang."""
    return 42 if server_args.enable_deterministic_inference else None


class ChainVerifyInput(DFlashVerifyInput):
    """A linear verify, as attention backends and graph runner see it.

    DFLASH verifies chains too: its input carries no mask, so every backend takes its causal path.
    """


def chain_verify_input(num_tokens: int, positions: torch.Tensor | None) -> ChainVerifyInput:
    """Describe a linear verify of ``num_tokens`` per request."""
    return ChainVerifyInput(
        draft_token=None,
        positions=positions,
        draft_token_num=num_tokens,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


@dataclass
class _Drafts:
    """Drafts of one batch on the device.

    ``tokens`` ``[B, K] int64``, ``count`` ``[B] int64`` of them real; laws as in ``VerifyRows``.
    """

    tokens: torch.Tensor
    count: torch.Tensor
    law_ids: torch.Tensor | None
    law_probs: torch.Tensor | None


class PSDWorker(BaseSpecWorker):
    """Verifies chains on the target and applies the acceptance rule.

    Parameters
    ----------
    server_args, gpu_id, ps, nccl_port, target_worker
        As ``Scheduler.maybe_init_draft_worker`` passes them.
    """

    def __init__(self, server_args, gpu_id, ps, nccl_port, target_worker: TpModelWorker):
        super().__init__()
        verify_applied()
        self.server_args = server_args
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.num_steps: int = server_args.speculative_num_steps
        self.chunk: int = self.num_steps + 1
        self.device = server_args.device
        self.context_len: int = self.model_runner.model_config.context_len
        # All ranks draw the same numbers: same seed, same sequence of calls.
        self._random = np.random.default_rng([server_args.random_seed, 0x505344])
        self._default_seed = default_seed(server_args)
        self._staged: list[DraftRow | None] | None = None
        self._pin = self.device != "cpu"

    # --- SGLang's worker contract ---------------------------------------------------------------

    @property
    def draft_worker(self) -> None:
        """There is none in this process."""
        return None

    def update_weights_from_tensor(self, recv_req):
        """New weights are the target's: SGLang dispatches to the draft worker first."""
        return self.target_worker.update_weights_from_tensor(recv_req)

    def update_weights_from_disk(self, recv_req):
        """Nothing to load here; the scheduler updates the target itself."""
        return True, "Succeeded to update model weights."

    def update_weights_from_ipc(self, recv_req):
        """Nothing to load here; the scheduler updates the target itself."""
        return True, "Succeeded to update model weights."

    def stage(self, drafts: Sequence[DraftRow | None]) -> None:
        """Hand over the drafts of the next verify, one entry per request of its batch."""
        self._staged = list(drafts)

    def forward_batch_generation(self, batch: ScheduleBatch, on_publish=None, grammar_barrier=None):
        """Run a prefill or one verify; returns device tensors, never waits.

        Returns
        -------
        GenerationBatchResult
            ``next_token_ids`` is ``[B]`` after a prefill and ``[B * (K + 1)]`` after a verify, where
            ``accept_lens`` ``[B] int32`` says how many of each row count.
        """
        if batch.forward_mode.is_idle() or batch.is_prefill_only:
            return self.target_worker.forward_batch_generation(batch)
        if batch.forward_mode.is_extend():
            return self._prefill(batch)
        return self._verify(batch)

    # --- one forward ----------------------------------------------------------------------------

    def _prefill(self, batch: ScheduleBatch) -> GenerationBatchResult:
        result = self.target_worker.forward_batch_generation(batch, is_verify=True)
        tokens, _ = self._sample(batch, result.logits_output, self._no_drafts(len(batch.reqs)))
        result.next_token_ids = tokens.view(-1)
        if batch.return_logprob:
            self._attach_logprobs(batch, result.logits_output, tokens)
            logprobs = result.logits_output.next_token_logprobs
            result.logits_output.next_token_logprobs = logprobs.view(-1)
        return result

    def _verify(self, batch: ScheduleBatch) -> GenerationBatchResult:
        drafts = self._stage_inputs(batch)
        result = self.target_worker.forward_batch_generation(batch, is_verify=True)
        tokens, lengths = self._sample(batch, result.logits_output, drafts)
        result.next_token_ids = tokens.view(-1)
        result.accept_lens = lengths
        result.speculative_num_draft_tokens = self.chunk
        if batch.return_logprob:
            self._attach_logprobs(batch, result.logits_output, tokens)
        batch.forward_mode = ForwardMode.DECODE
        return result

    def _stage_inputs(self, batch: ScheduleBatch) -> _Drafts:
        """Turn host-side drafts into the verify batch: ids, positions, KV slots."""
        reqs, steps = batch.reqs, self.num_steps
        staged = self._staged or [None] * len(reqs)
        self._staged = None
        if len(staged) != len(reqs):
            raise AssertionError(f"{len(staged)} draft rows were staged for {len(reqs)} requests")
        host = np.zeros((len(reqs), steps + 2), dtype=np.int64)  # last token, drafts, number of drafts
        for i, (req, row) in enumerate(zip(reqs, staged)):
            host[i, 0] = req.output_ids[-1]
            if row is not None and len(row.tokens):
                host[i, 1 : 1 + len(row.tokens)] = row.tokens
                host[i, -1] = len(row.tokens)
        packed = self._to_device(torch.from_numpy(host))
        start = batch.seq_lens.view(-1, 1)
        slots = start + torch.arange(self.chunk, device=start.device)
        # Columns past a request's last draft may lie beyond the context; their result is never used.
        positions = slots.clamp(max=self.context_len - 1).view(-1)
        batch.input_ids = packed[:, : self.chunk].reshape(-1)
        batch.out_cache_loc = batch.req_to_token_pool.req_to_token[batch.req_pool_indices.view(-1, 1), slots]
        batch.out_cache_loc = batch.out_cache_loc.view(-1).to(torch.int64)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.spec_info = chain_verify_input(self.chunk, positions)
        return _Drafts(packed[:, 1 : 1 + steps], packed[:, -1], *self._stage_laws(staged))

    def _stage_laws(self, staged: list[DraftRow | None]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not any(row is not None and row.law_ids is not None for row in staged):
            return None, None
        ids, probs = _pack_laws(staged, self.num_steps)
        return self._to_device(torch.from_numpy(ids)), self._to_device(torch.from_numpy(probs))

    def _no_drafts(self, batch_size: int) -> _Drafts:
        empty = torch.empty(batch_size, 0, dtype=torch.int64, device=self.device)
        return _Drafts(empty, torch.zeros(batch_size, dtype=torch.int64, device=self.device), None, None)

    # --- sampling -------------------------------------------------------------------------------

    def _sample(
        self, batch: ScheduleBatch, output: LogitsProcessorOutput, drafts: _Drafts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the acceptance rule to logits ``[B * (K + 1), V]``; ``K`` is 0 after a prefill."""
        reqs, info = batch.reqs, batch.sampling_info
        chunk = drafts.tokens.shape[1] + 1
        logits = output.next_token_logits.view(len(reqs), chunk, -1)
        self._adjust_logits(reqs, info, logits)
        filters = self._filters(reqs, info)
        uniforms = torch.from_numpy(self._random.random((len(reqs), chunk), dtype=np.float32))
        rows = VerifyRows(
            drafts=drafts.tokens,
            num_drafts=drafts.count,
            law_ids=drafts.law_ids,
            law_probs=drafts.law_probs,
            uniforms=self._to_device(uniforms),
            deterministic=filters.greedy | filters.seeded,
        )
        if not (filters.any_sampled or filters.any_seeded):
            return accept_chain(rows, torch.argmax(logits, dim=-1), None)
        probs = filtered_probs(logits, filters)
        # batch.seq_lens is the prefix of a verify, and prefix plus prompt chunk after a prefill.
        first = batch.seq_lens + 1 if batch.forward_mode.is_target_verify() else batch.seq_lens
        positions = first.view(-1, 1) + torch.arange(chunk, device=first.device)
        choice = target_choice(logits, probs, filters, positions)
        return accept_chain(rows, choice, probs if filters.any_sampled else None)

    def _adjust_logits(self, reqs: list[Req], info: SamplingBatchInfo, logits: torch.Tensor) -> None:
        """SGLang's own adjustments, in place, as its sampler makes them.

        A bias is the same at every position. All else looks at what was generated before, so it is applied to
        the first position; requests that ask for it have no drafts (``needs_plain_step``).
        """
        if info.logit_bias is not None and logits.shape[1] > 1:
            logits[:, 1:].add_(info.logit_bias.unsqueeze(1))
        if info.logit_bias is None and not any(needs_plain_step(req) for req in reqs):
            return
        first = LogitsProcessorOutput(next_token_logits=logits[:, 0].contiguous())
        self.model_runner._preprocess_logits(first, info)
        self.model_runner.sampler._preprocess_logits(first.next_token_logits, info)
        logits[:, 0] = first.next_token_logits

    def _filters(self, reqs: list[Req], info: SamplingBatchInfo) -> Filters:
        own = [req.sampling_params.sampling_seed for req in reqs]
        seeds = [self._default_seed if seed is None else seed for seed in own]
        sampled = [not is_greedy(req) for req in reqs]
        any_seeded = any(wanted and seed is not None for wanted, seed in zip(sampled, seeds))
        greedy = info.top_ks <= 1
        if any_seeded:
            table = [[seed or 0, seed is not None] for seed in seeds]
            packed = self._to_device(torch.tensor(table, dtype=torch.int64))
            seed_values, seeded = packed[:, 0], packed[:, 1].bool() & ~greedy
        else:
            seed_values, seeded = torch.zeros_like(info.top_ks, dtype=torch.int64), torch.zeros_like(greedy)
        return Filters(
            temperatures=info.temperatures.view(-1),
            top_ks=info.top_ks,
            top_ps=info.top_ps,
            min_ps=info.min_ps,
            greedy=greedy,
            seeded=seeded,
            seeds=seed_values,
            any_sampled=any(wanted and seed is None for wanted, seed in zip(sampled, seeds)),
            any_seeded=any_seeded,
            any_filter=any(
                req.sampling_params.top_p != 1.0
                or req.sampling_params.min_p > 0
                or req.sampling_params.top_k < info.vocab_size
                for req, wanted in zip(reqs, sampled)
                if wanted
            ),
        )

    def _attach_logprobs(self, batch: ScheduleBatch, output: LogitsProcessorOutput, tokens: torch.Tensor) -> None:
        """Fill ``next_token_logprobs`` and friends, one row of ``tokens.shape[1]`` entries per request."""
        index = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
        compute_spec_v2_logprobs(batch, output, tokens.reshape(-1), index, tokens.shape[1] - 1)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._pin:
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _pack_laws(staged: list[DraftRow | None], num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Sparse laws of a batch, ``[B, K, M]`` int64 ids and float32 probabilities.

    A row that came without a law proposed its tokens with certainty.
    """
    width = max(row.law_ids.shape[1] for row in staged if row is not None and row.law_ids is not None)
    ids = np.zeros((len(staged), num_steps, width), dtype=np.int64)
    probs = np.zeros((len(staged), num_steps, width), dtype=np.float32)
    for i, row in enumerate(staged):
        if row is None or not len(row.tokens):
            continue
        count = len(row.tokens)
        if row.law_ids is None or row.law_probs is None:
            ids[i, :count, 0], probs[i, :count, 0] = row.tokens, 1.0
        else:
            ids[i, :count, : row.law_ids.shape[1]] = row.law_ids
            probs[i, :count, : row.law_probs.shape[1]] = row.law_probs
    return ids, probs
