"""The target side of a round, as SGLang's scheduler calls it.

Implements the V2 worker contract (``sglang/srt/speculative/base_spec_worker.py``) without a draft worker:
drafts come from another process and are handed over by ``stage`` before each verify. Nothing in here waits
for the device.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    get_server_return_hidden_states_mode,
)
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_psd.channel.draft_rows import DraftBatch
from sglang_psd.draft_method import head_of
from sglang_psd.hooks import verify_applied
from sglang_psd.target.gate import Gate
from sglang_psd.target.hidden_states import TargetFeatures, capture_layers, keep_features
from sglang_psd.target.page_tables import widen_page_tables
from sglang_psd.target.plans import HostPlans
from sglang_psd.target.processors import ChunkCalls
from sglang_psd.target.sampler import ChunkSampler, StagedDrafts
from sglang_psd.target.simulated import SimulatedAcceptance
from sglang_psd.target.verify_input import chain_verify_input
from sglang_psd.transfer import to_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker

logger = logging.getLogger(__name__)

# Where ``manifest`` of ``update_weights_from_disk`` names a checkpoint for the draft model.
DRAFT_PATH = "draft_model_path"
BOTH_UPDATED = "Succeeded to update model weights of the target and of the draft model."
TARGET_ALONE = "The target has its new weights, the draft model keeps its own"
TARGET_UPDATED = (
    "Succeeded to update model weights of the target; the draft model keeps its own, which changes how many drafts are "
    "accepted and nothing else."
)


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
        self._sampler = ChunkSampler(server_args, target_worker.random_seed)
        self._simulated = SimulatedAcceptance.from_environment(self.chunk, target_worker.random_seed)
        self._plans = HostPlans(self.model_runner, self.chunk)
        self._fetch: Callable[[], DraftBatch] | None = None
        self._begin: Callable[[], None] = lambda: None
        self._gate: Gate | None = None
        self._ahead = False
        self._head = head_of(server_args)
        self._features: TargetFeatures | None = None
        # Set by the scheduler: takes a path, returns why the draft model keeps its weights.
        self.update_draft: Callable[[str], str | None] = lambda path: None
        if self._head is not None:
            may_be_asked_for = get_server_return_hidden_states_mode(server_args).need_capture()
            capture_layers(self.model_runner.model, self._head, last_too=may_be_asked_for)

    # --- SGLang's worker contract ---------------------------------------------------------------

    @property
    def draft_worker(self) -> None:
        """There is none in this process."""
        return None

    def init_attention_backends(self):
        """The target has its attention backend by now, and no CUDA graph yet."""
        super().init_attention_backends()
        if self.device != "cpu":
            widen_page_tables(self.model_runner.attn_backend, self.chunk)

    def update_weights_from_tensor(self, recv_req):
        """New weights are the target's: SGLang dispatches to the draft worker first."""
        success, message = self.target_worker.update_weights_from_tensor(recv_req)
        return success, TARGET_UPDATED if success else message

    def update_weights_from_disk(self, recv_req):
        """The scheduler has updated the target; the draft model follows where the request names a checkpoint for it."""
        path = (recv_req.manifest or {}).get(DRAFT_PATH)
        if path is None:
            return True, TARGET_UPDATED
        problem = self.update_draft(str(path))
        if problem is None:
            return True, BOTH_UPDATED
        return False, f"{TARGET_ALONE}: {problem}"

    def update_weights_from_ipc(self, recv_req):
        """Nothing to load here; the scheduler updates the target itself."""
        return True, TARGET_UPDATED

    def queue_ahead(self) -> None:
        """Queue verifies before their drafts are there, from now on, where nothing speaks against it."""
        try:
            if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
                raise RuntimeError("CUDA_LAUNCH_BLOCKING is set")
            gate = Gate()
            with gate.closed():
                pass
        except (ImportError, RuntimeError) as error:
            logger.warning("PSD: verifies are queued only when their drafts are there (%s)", error)
        else:
            self._gate = gate

    def stage(self, fetch: Callable[[], DraftBatch], begin: Callable[[], None], *, ahead: bool = False) -> None:
        """Say where the drafts of the next verify come from, one entry per request of its batch.

        Parameters
        ----------
        fetch : callable
            May wait for the drafter: it is called when all else is done.
        begin : callable
            Called at the place in the stream's order where nothing but the device is waited for any more.
        ahead : bool
            Whether the forward may be queued before ``fetch`` is called, which then asks nothing of the device.
        """
        self._fetch, self._begin, self._ahead = fetch, begin, ahead

    def take_features(self) -> TargetFeatures | None:
        """Hidden states of the last forward for an EAGLE head, once; None when there is no head."""
        features, self._features = self._features, None
        return features

    def take_calls(self) -> ChunkCalls | None:
        """What custom logit processors did at the last forward, once; None where there were none."""
        return self._sampler.take_calls()

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
        mode = None if self._head is None else CaptureHiddenMode.FULL
        result = self.target_worker.forward_batch_generation(batch, is_verify=True, capture_hidden_mode=mode)
        self._features = self._keep_features(batch, result, 0)
        tokens, _ = self._sampler.sample(batch, result.logits_output, self._no_drafts(len(batch.reqs)))
        result.next_token_ids = tokens.view(-1)
        if batch.return_logprob:
            self._sampler.attach_logprobs(batch, result.logits_output, tokens)
            logprobs = result.logits_output.next_token_logprobs
            result.logits_output.next_token_logprobs = logprobs.view(-1)
        return result

    def _verify(self, batch: ScheduleBatch) -> GenerationBatchResult:
        forward_batch, in_graph = self._prepare(batch)
        table = self._begin_table(batch.reqs)
        on_device = table if self.device == "cpu" else torch.empty_like(table, device=self.device)

        def forward() -> GenerationBatchResult:
            self._begin()
            if on_device is not table:
                on_device.copy_(table, non_blocking=True)
            forward_batch.input_ids.copy_(on_device[:, : self.chunk].reshape(-1))
            return self.target_worker.forward_batch_generation(None, forward_batch=forward_batch, is_verify=True)

        if self._gate is not None and self._ahead and in_graph:
            with self._gate.closed():
                result = forward()
                drafts = self._fetch_drafts(table, self._gate.claim)
            if self._gate.forced:
                # Whatever it was that waited for the device may do so again, and each time costs a minute.
                logger.error("PSD: from now on verifies are queued only when their drafts are there.")
                self._gate = None
        else:
            drafts = self._fetch_drafts(table)
            result = forward()
        chain, counts = table[:, : self.chunk], drafts.counts.tolist()
        staged = StagedDrafts(on_device[:, : self.chunk], on_device[:, -1], chain, counts, *self._stage_laws(drafts))
        self._features = self._keep_features(batch, result, self.chunk)
        tokens, lengths = self._sampler.sample(batch, result.logits_output, staged)
        if self._simulated is not None:
            tokens, lengths = self._simulated.replace(tokens, staged)
        result.next_token_ids = tokens.view(-1)
        result.accept_lens = lengths
        result.speculative_num_draft_tokens = self.chunk
        if batch.return_logprob:
            self._sampler.attach_logprobs(batch, result.logits_output, tokens)
        batch.forward_mode = ForwardMode.DECODE
        return result

    def _keep_features(self, batch: ScheduleBatch, result: GenerationBatchResult, width: int) -> TargetFeatures | None:
        if self._head is None:
            return None
        # As SGLang's book-keeping counts the rows of a prefill (``batch_result_processor.py``).
        mode = max(batch.return_hidden_states_mode, get_server_return_hidden_states_mode(self.server_args))
        last_only = not mode.is_full()
        return keep_features(batch, result.logits_output, width, self._head.feature_size, last_only=last_only)

    def _prepare(self, batch: ScheduleBatch) -> tuple[ForwardBatch, bool]:
        """Make ready all of a verify but its token ids: positions, KV slots, attention plan, the graph's buffers.

        Also says whether a CUDA graph will run it. The order is that of ``DFlashVerifyInput.prepare_for_verify`` in
        ``sglang/srt/speculative/dflash_info.py``.
        """
        start = batch.seq_lens.view(-1, 1)
        slots = start + torch.arange(self.chunk, device=start.device)
        # Columns past a request's last draft may lie beyond the context; their result is never used.
        positions = slots.clamp(max=self.context_len - 1).view(-1)
        batch.input_ids = torch.zeros(slots.numel(), dtype=torch.int64, device=slots.device)
        batch.out_cache_loc = batch.req_to_token_pool.req_to_token[batch.req_pool_indices.view(-1, 1), slots]
        batch.out_cache_loc = batch.out_cache_loc.view(-1).to(torch.int64)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.spec_info = chain_verify_input(self.chunk, positions, self._head is not None)
        self._plans.announce(batch.seq_lens_cpu)
        self.target_worker.set_hicache_consumer(batch.hicache_consumer_index)
        forward_batch = ForwardBatch.init_new(batch, self.model_runner, return_hidden_states_before_norm=False)
        graphs = self.model_runner.decode_cuda_graph_runner
        in_graph = bool(self.device != "cpu" and graphs and graphs.can_run_graph(forward_batch))
        if in_graph:
            graphs.load_batch(forward_batch)
        else:
            self.model_runner.attn_backend.init_forward_metadata(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        return forward_batch, in_graph

    def _begin_table(self, reqs: list[Req]) -> torch.Tensor:
        """What a verify needs of its drafts, on the host: last token, drafts, their number; ``[B, K + 2] int64``.

        No drafts yet: whoever reads it now verifies none.
        """
        table = torch.zeros(len(reqs), self.num_steps + 2, dtype=torch.int64, pin_memory=self.device != "cpu")
        table.numpy()[:, 0] = [req.output_ids[-1] for req in reqs]
        return table

    def _fetch_drafts(self, table: torch.Tensor, may_write: Callable[[], bool] = lambda: True) -> DraftBatch:
        """Wait for the drafts and write them down; none count when ``may_write`` then says that it is too late."""
        fetch, self._fetch = self._fetch, None
        drafts = DraftBatch.empty(len(table), self.num_steps) if fetch is None else fetch()
        if len(drafts) != len(table):
            raise AssertionError(f"{len(drafts)} draft rows were staged for {len(table)} requests")
        if not may_write():
            return DraftBatch.empty(len(table), self.num_steps)
        host = table.numpy()
        host[:, 1 : self.chunk], host[:, -1] = drafts.tokens, drafts.counts
        return drafts

    def _stage_laws(self, drafts: DraftBatch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        laws = drafts.laws()
        if laws is None:
            return None, None
        return to_device(torch.from_numpy(laws[0]), self.device), to_device(torch.from_numpy(laws[1]), self.device)

    def _no_drafts(self, batch_size: int) -> StagedDrafts:
        empty = torch.empty(batch_size, 1, dtype=torch.int64, device=self.device)
        none = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        return StagedDrafts(empty, none, torch.zeros(batch_size, 1, dtype=torch.int64), [0] * batch_size, None, None)
