"""An EAGLE head and its pools, driven by raw batches.

SGLang's own model classes run as they are. At position i a head reads the embedding of token i + 1 and the target's
hidden state at position i; it predicts token i + 2. Where the target has not been yet, its own output takes the place
of the hidden state.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from sglang_psd.drafter.chain import Chain, HostChain
from sglang_psd.drafter.columns import Kinds
from sglang_psd.drafter.head_chain import HeadColumns, Vocabulary, run_head_step
from sglang_psd.drafter.head_graphs import HeadGraphs
from sglang_psd.drafter.head_rows import HeadState
from sglang_psd.drafter.head_weights import read_target_matrices
from sglang_psd.drafter.loading import load_worker
from sglang_psd.drafter.model import DraftModel
from sglang_psd.drafter.spec import DrafterSpec, HeadSpec
from sglang_psd.errors import DrafterStartError
from sglang_psd.transfer import to_device


class HeadModel(DraftModel):
    """Loads head and target matrices; feeds tokens with hidden states and returns logits with hidden states.

    Parameters
    ----------
    spec : DrafterSpec
        With ``head``.

    Attributes
    ----------
    vocabulary : Vocabulary
    dtype : torch.dtype

    Raises
    ------
    DrafterStartError
        The target's matrices are missing or of another shape.
    """

    def __init__(self, spec: DrafterSpec):
        assert spec.head is not None
        # The graphs of a draft model run it without hidden states; a head has its own.
        super().__init__(msgspec.structs.replace(spec, cuda_graphs=False))
        # Ended requests keep their rows, see ``head_cache.py``.
        self._num_rows = self._table.req_to_token.shape[0] - 1
        self._free_rows = list(range(self._num_rows, 0, -1))
        self._model = self._runner.model
        self.dtype: torch.dtype = self._runner.dtype
        token_map = self._token_map(spec.head)
        if spec.head.target_load_format != "dummy":
            self._take_matrices(spec.head, token_map)
        ids = None if token_map is None else token_map.to(self.device)
        self.vocabulary = Vocabulary(min(spec.vocab_limit, self.vocab_size), ids)
        self._head_graphs = (
            HeadGraphs(self._runner, spec, self._generator, self.vocabulary) if spec.cuda_graphs else None
        )

    # --- loading --------------------------------------------------------------------------------

    def _load_worker(self, spec: DrafterSpec) -> Any:
        assert spec.head is not None
        overrides: dict[str, Any] = {"max_position_embeddings": spec.head.context_len}
        if spec.head.token_map is not None:
            overrides["hot_vocab_size"] = len(read_token_map(spec.head.token_map))
        return load_worker(
            spec,
            json_model_override_args=json.dumps(overrides),
            # Each request stands in a chain's first step as often as tokens may have been accepted.
            max_running_requests=(spec.num_steps + 1) * spec.max_requests,
            disable_flashinfer_autotune=True,  # it would run the model without hidden states
        )

    def _token_map(self, head: HeadSpec) -> torch.Tensor | None:
        """Ids of a reduced vocabulary: the checkpoint's (EAGLE-3), or a file's."""
        ids = getattr(self._model, "hot_token_id", None)
        if ids is None and head.token_map is not None and not self._own_output():
            ids = torch.tensor(read_token_map(head.token_map))
        if ids is None:
            return None
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            raise DrafterStartError(
                f"The EAGLE head's token map names ids up to {int(ids.max())}, and there are {self.vocab_size} tokens."
            )
        return ids.to(torch.int64)

    def copy_kv(self, source: HeadState, target: HeadState, length: int) -> None:
        """Copy the KV of the first ``length`` positions; ``target`` has slots for them."""
        table = self._table.req_to_token
        there, here = (table[state.pool_row, :length].to(torch.int64) for state in (source, target))
        pool = self._allocator.get_kvcache()
        for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
            for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
                buffer[here] = buffer[there]

    def _own_output(self) -> bool:
        """Whether the head brings an output matrix of its own, as most EAGLE-3 heads do."""
        shared = getattr(self._model, "load_lm_head_from_target", None)
        return shared is False

    def _take_matrices(self, head: HeadSpec, token_map: torch.Tensor | None) -> None:
        """Put the target's embedding and, where the head has none, its output matrix in place."""
        tied = self._model.lm_head is self._model.model.embed_tokens
        want_output = not self._own_output() and not tied
        embedding, output = read_target_matrices(head.target_path, head.target_revision, want_output=want_output)
        config = self._runner.model_config.hf_config
        if getattr(config, "target_hidden_size", config.hidden_size) == config.hidden_size:
            _fill(self._model.model.embed_tokens, embedding, "embedding")
        if output is not None:
            rows = output if token_map is None else output[token_map]
            _fill(self._model.lm_head, rows, "output matrix")

    # --- forwards -------------------------------------------------------------------------------

    def feed(self, states: Sequence[HeadState], takes: list[int], features: torch.Tensor) -> None:
        """Feed ``takes[i]`` positions of each request, which count as fed already; the logits are not wanted.

        Parameters
        ----------
        states : sequence of HeadState
        takes : list of int
        features : Tensor, ``[sum(takes), feature_size]``
            The target's hidden states, in the order of the requests.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        prefix = [state.fed - take for state, take in zip(states, takes)]
        table: list[list[int]] = []
        ids: list[int] = []
        positions: list[int] = []
        for state, take, fed in zip(states, takes, prefix):
            first = state.start + fed
            table += [[state.pool_row, fed + j] for j in range(take)]
            ids += state.tokens[first + 1 : first + 1 + take]
            positions += range(first, first + take)
        starts = np.concatenate([[0], np.cumsum(takes)[:-1]])
        packed = to_device(torch.tensor([*zip(*table), ids, positions], dtype=torch.int64), self.device)
        lens_cpu = torch.tensor([p + t for p, t in zip(prefix, takes)], dtype=torch.int64)
        counts = np.stack([[state.pool_row for state in states], lens_cpu.numpy(), takes, prefix, starts])
        rows, lens, extend, before, begin = to_device(torch.from_numpy(counts.astype(np.int64)), self.device)
        self._forward_head(
            ForwardMode.EXTEND,
            rows,
            lens_cpu,
            lens,
            packed[2],
            packed[3],
            self._slots(packed[0], packed[1]),
            features,
            extend_num_tokens=len(ids),
            extend_seq_lens=extend.to(torch.int32),
            extend_prefix_lens=before.to(torch.int32),
            extend_start_loc=begin.to(torch.int32),
            extend_seq_lens_cpu=takes,
            extend_prefix_lens_cpu=prefix,
            extend_logprob_start_lens_cpu=takes,
        )

    @torch.inference_mode()
    def draft_chain(self, states: Sequence[HeadState], num_steps: int) -> HostChain:
        """Feed what waits of each request, at most ``spec.num_steps + 1`` positions, and draft ``num_steps`` tokens.

        KV for what waits and for ``num_steps - 1`` positions more must have been reserved.
        """
        if self._head_graphs is not None and num_steps == self._spec.num_steps:
            chain, kinds = self._head_graphs.draft(states)
        else:
            chain, kinds = self._draft_eagerly(states, num_steps)
        return chain.to_host(kinds, len(states))

    def _draft_eagerly(self, states: Sequence[HeadState], num_steps: int) -> tuple[Chain, Kinds]:
        columns = HeadColumns.empty(len(states), self._spec.num_steps + 1, "cpu")
        kinds, picks = columns.fill(states)
        pieces = [piece for state in states for piece in state.take(state.feedable)]
        hidden = torch.cat(pieces).index_select(0, to_device(torch.tensor(picks), self.device))
        on_device = HeadColumns(columns.base.on(self.device), to_device(columns.extra, self.device))
        uniforms = self._draw_uniforms(kinds, num_steps, len(states))
        law_size = min(self._spec.top_m, self.vocabulary.size)
        chain = Chain.empty(num_steps, len(states), law_size, self.device)
        for step in range(num_steps):
            lens_cpu = columns.step_batch(step)[1]

            def decode(rows, lens, positions, ids, hidden, lens_cpu=lens_cpu) -> tuple[torch.Tensor, torch.Tensor]:
                from sglang.srt.model_executor.forward_batch_info import ForwardMode

                slots = self._slots(rows, lens - 1)
                return self._forward_head(ForwardMode.DECODE, rows, lens_cpu, lens, ids, positions, slots, hidden)

            hidden = run_head_step(decode, on_device, hidden, chain, kinds, uniforms, step, self.vocabulary)
        return chain, kinds

    def _slots(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return self._table.req_to_token[rows, columns].to(torch.int64)

    def _forward_head(
        self, mode, rows, lens_cpu, lens, ids, positions, slots, features, **extend: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        backend = self._runner.attn_backend
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=ids,
            req_pool_indices=rows,
            seq_lens=lens,
            out_cache_loc=slots,
            seq_lens_sum=int(lens_cpu.sum()),
            seq_lens_cpu=lens_cpu,
            positions=positions,
            capture_hidden_mode=CaptureHiddenMode.LAST,
            return_hidden_states_before_norm=False,
            spec_algorithm=self._runner.spec_algorithm,
            num_token_non_padded_cpu=len(ids),
            **extend,
        )
        with forward_context(ForwardContext(attn_backend=backend)):
            # Planned as a plain batch: backends would look for SGLang's own draft loop behind a draft input.
            backend.init_forward_metadata(batch)
            batch.mark_forward_metadata_ready()
            batch.spec_info = EagleDraftInput(hidden_states=features.to(self.dtype))
            output = self._model.forward(ids, positions, batch)
        return output.next_token_logits, output.hidden_states


def read_token_map(path: str) -> list[int]:
    """Read a map as SGLang does."""
    from sglang.srt.speculative.spec_utils import load_token_map

    return [int(token) for token in load_token_map(path)]


def _fill(layer: torch.nn.Module, matrix: torch.Tensor, name: str) -> None:
    """Load ``matrix`` into a vocabulary layer of SGLang, whose padding it takes care of."""
    expected = (layer.org_vocab_size, layer.embedding_dim)
    if tuple(matrix.shape) != expected:
        raise DrafterStartError(
            f"The target's {name} is {tuple(matrix.shape)}, the EAGLE head works with {expected}; "
            "name a head made for this target."
        )
    layer.weight_loader(layer.weight, matrix.to(layer.weight.dtype))
