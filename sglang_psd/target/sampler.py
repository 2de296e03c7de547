"""From a chunk's logits to its tokens: SGLang's sampling parameters around the acceptance rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_psd.target.acceptance import Filters, VerifyRows, accept_chain, filtered_probs, target_choice
from sglang_psd.target.penalties import PenaltyRow, apply_penalties, count_tokens
from sglang_psd.target.processors import ChunkCalls, process_chunk
from sglang_psd.target.requests import (
    default_seed,
    has_penalties,
    is_greedy,
    min_length_stops,
    seed_of,
)
from sglang_psd.transfer import to_device

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

# Attribute of a request: its token counts on the device, and how many output tokens they cover.
_COUNTS = "_psd_token_counts"


@dataclass
class StagedDrafts:
    """Drafts of one batch on the device.

    ``verified`` ``[B, K + 1] int64`` is what the target verifies: the token that the drafts continue, then the drafts,
    ``count`` ``[B] int64`` of them real; laws as in ``VerifyRows``. ``chain`` and ``host_count`` are the first two
    on the host.
    """

    verified: torch.Tensor
    count: torch.Tensor
    chain: torch.Tensor
    host_count: Sequence[int]
    law_ids: torch.Tensor | None
    law_probs: torch.Tensor | None

    @property
    def tokens(self) -> torch.Tensor:
        """The drafts, ``[B, K] int64``."""
        return self.verified[:, 1:]

    def on_host(self) -> list[list[int]]:
        """The real drafts of each request."""
        return [row[1 : 1 + count] for row, count in zip(self.chain.tolist(), self.host_count)]


class ChunkSampler:
    """Samples the tokens of prefills and verifies.

    Parameters
    ----------
    server_args : ServerArgs
    random_seed : int
        Of the target's worker: the same on all ranks, where each node's arguments may have another.
    """

    def __init__(self, server_args, random_seed: int):
        self._calls: ChunkCalls | None = None
        self._device: str = server_args.device
        self._default_seed = default_seed(server_args)
        # All tensor-parallel ranks draw the same numbers: same seed, same sequence of calls.
        self._random = np.random.default_rng([random_seed, 0x505344])

    def sample(
        self, batch: ScheduleBatch, output: LogitsProcessorOutput, drafts: StagedDrafts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the acceptance rule.

        Parameters
        ----------
        batch : ScheduleBatch
            As forwarded.
        output : LogitsProcessorOutput
            ``next_token_logits`` is ``[B * (K + 1), V]``, adjusted in place; ``K`` is 0 after a prefill.
        drafts : StagedDrafts

        Returns
        -------
        tokens : Tensor, ``[B, K + 1] int64``
        lengths : Tensor, ``[B] int32``
            How many of each row count.
        """
        reqs, info = batch.reqs, batch.sampling_info
        chunk = drafts.tokens.shape[1] + 1
        logits = output.next_token_logits.view(len(reqs), chunk, -1)
        apply_penalties(logits, drafts.tokens, self._penalty_rows(reqs, info.vocab_size))
        if batch.has_grammar:
            self._apply_grammars(reqs, info, logits, drafts.chain)
        if info.logit_bias is not None:
            logits.add_(info.logit_bias.unsqueeze(1))  # the same at every position
        if info.has_custom_logit_processor:
            # In the middle of a prompt no token is drawn.
            reading = None if batch.forward_mode.is_target_verify() else batch.chunked_req
            self._calls = process_chunk(reqs, info, logits, drafts.on_host(), reading)
        sanitize_nan_logits(logits, "sampler: next_token_logits")
        filters = self._filters(reqs, info)
        uniforms = torch.from_numpy(self._random.random((len(reqs), chunk), dtype=np.float32))
        rows = VerifyRows(
            drafts=drafts.tokens,
            num_drafts=drafts.count,
            law_ids=drafts.law_ids,
            law_probs=drafts.law_probs,
            uniforms=to_device(uniforms, self._device),
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

    def _penalty_rows(self, reqs: list[Req], vocab_size: int) -> list[PenaltyRow]:
        rows = []
        for i, req in enumerate(reqs):
            if not has_penalties(req):
                continue
            params = req.sampling_params
            counts, counted = getattr(req, _COUNTS, (None, 0))
            if counted > len(req.output_ids):  # a request of embeddings begins anew after a retraction
                counts, counted = None, 0
            counts = count_tokens(counts, req.output_ids[counted:], vocab_size, self._device)
            setattr(req, _COUNTS, (counts, len(req.output_ids)))
            rows.append(
                PenaltyRow(
                    row=i,
                    counts=counts,
                    num_generated=len(req.output_ids),
                    frequency=params.frequency_penalty,
                    presence=params.presence_penalty,
                    repetition=params.repetition_penalty,
                    min_new_tokens=params.min_new_tokens,
                    stop_ids=sorted(min_length_stops(req)) if params.min_new_tokens else (),
                )
            )
        return rows

    def _apply_grammars(
        self, reqs: list[Req], info: SamplingBatchInfo, logits: torch.Tensor, chain: torch.Tensor
    ) -> None:
        """Mask every position by what the grammar allows after the drafts before it.

        Host work, done while the forward runs. A draft that breaks its grammar loses its probability and is
        rejected like any other; SGLang's traversal leaves the matchers where they were.
        """
        links = torch.full_like(chain, -1)
        links[:, :-1] = torch.arange(1, chain.shape[1])
        tree = GrammarTree.from_host(links, torch.full_like(chain, -1), chain)
        mask = build_grammar_vocab_mask(reqs=reqs, tree=tree, sampling_info=info, device=self._device, barrier=None)
        if mask is not None:
            mask.apply(logits.view(-1, logits.shape[-1]))

    def _filters(self, reqs: list[Req], info: SamplingBatchInfo) -> Filters:
        seeds = [seed_of(req, self._default_seed) for req in reqs]
        sampled = [not is_greedy(req) for req in reqs]
        any_seeded = any(wanted and seed is not None for wanted, seed in zip(sampled, seeds))
        greedy = info.top_ks <= 1
        if any_seeded:
            table = [[seed or 0, seed is not None] for seed in seeds]
            packed = to_device(torch.tensor(table, dtype=torch.int64), self._device)
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

    def take_calls(self) -> ChunkCalls | None:
        """What custom logit processors did in the last call of ``sample``, once; None where there were none."""
        calls, self._calls = self._calls, None
        return calls

    def attach_logprobs(self, batch: ScheduleBatch, output: LogitsProcessorOutput, tokens: torch.Tensor) -> None:
        """Fill ``next_token_logprobs`` and friends, one row of ``tokens.shape[1]`` entries per request."""
        index = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
        compute_spec_v2_logprobs(batch, output, tokens.reshape(-1), index, tokens.shape[1] - 1)
        chosen = output.next_token_token_ids_logprobs_val
        if chosen:
            # A request without ``token_ids_logprob`` gets a list here, where SGLang's book-keeping expects a tensor.
            output.next_token_token_ids_logprobs_val = [
                row if torch.is_tensor(row) else torch.empty(0, dtype=torch.float32) for row in chosen
            ]
