"""``torch_native`` attention with the verify mode it lacks.

Stock ``TorchNativeAttnBackend`` (``sglang/srt/layers/attention/torch_native_backend.py``) has no
branch for ``TARGET_VERIFY`` and, for a prefill, computes a whole ``[kv, kv]`` score matrix per
request to use its last rows. A chain of drafts is a short causal extension: each request has
``n`` query rows that see the prefix plus themselves, which is one masked SDPA call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class VerifyingTorchNativeBackend(TorchNativeAttnBackend):
    """Adds chain verification: causal attention of ``n`` new tokens per request."""

    def forward_extend(self, q, k, v, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache=True):
        """Attention of an extend or verify batch; ``q`` is ``[tokens, heads * head_dim]``."""
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        return self._forward_verify(q, layer, forward_batch)

    def _forward_verify(self, q: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch) -> torch.Tensor:
        batch_size = forward_batch.batch_size
        query = q.view(batch_size, -1, layer.tp_q_head_num, layer.qk_head_dim)
        width = query.shape[1]
        output = query.new_empty(batch_size, width, layer.tp_q_head_num, layer.v_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        table = self.req_to_token_pool.req_to_token
        rows = forward_batch.req_pool_indices.tolist()
        # seq_lens is the committed prefix here: the chunk's own tokens come after it.
        prefixes = forward_batch.seq_lens.tolist()
        for i, (row, prefix) in enumerate(zip(rows, prefixes)):
            slots = table[row, : prefix + width]
            mask = torch.ones(width, prefix + width, dtype=torch.bool).tril_(diagonal=prefix)
            window = layer.sliding_window_size
            if window is not None and window > -1:
                mask.triu_(diagonal=prefix - window)
            output[i] = (
                scaled_dot_product_attention(
                    query[i].transpose(0, 1).unsqueeze(0),
                    keys[slots].transpose(0, 1).unsqueeze(0).to(query.dtype),
                    values[slots].transpose(0, 1).unsqueeze(0).to(query.dtype),
                    attn_mask=mask,
                    scale=layer.scaling,
                    enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
                )
                .squeeze(0)
                .transpose(0, 1)
            )
        return output.reshape(batch_size * width, layer.tp_q_head_num * layer.v_head_dim)


def install() -> None:
    """Register the backend under SGLang's own name, so that flags and choices stay as they are."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    def create(runner: ModelRunner) -> VerifyingTorchNativeBackend:
        return VerifyingTorchNativeBackend(runner)

    ATTENTION_BACKENDS["torch_native"] = create
