"""How much scratch memory FlashInfer needs to verify a full batch.

SGLang reserves a fixed size, which a slot of 128 requests of a model with 64 query heads exceeds: planning then fails,
and the server with it.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

# What SGLang's own buffer is called (``sglang/srt/layers/attention/flashinfer_backend.py``).
BUFFER = "flashinfer_workspace"
# Other users of the buffer, and what alignment costs.
SLACK_BYTES = 64 << 20


def query_tile(packed_len: int, head_dim: int) -> int:
    """Rows of a query tile for ``packed_len`` = query length times group size.

    ``FA2DetermineCtaTileQ`` in flashinfer's ``utils.cuh``, for GPUs since Ampere.
    """
    if head_dim >= 512:
        return 16 if packed_len <= 32 else 32
    if packed_len > 64 and head_dim < 256:
        return 128
    return 64 if packed_len > 16 else 16


def verify_workspace_bytes(batch_size: int, chunk: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of the partial results of a captured verify.

    Under CUDA graphs FlashInfer provides for any split of the captured tokens over requests
    (``PrefillSplitQOKVIndptr`` in its ``attention/scheduler.cuh``).

    Parameters
    ----------
    batch_size : int
        Largest captured batch.
    chunk : int
        Tokens per request, K + 1.
    num_heads, num_kv_heads, head_dim : int
        Of one tensor-parallel rank.
    """
    rows, group = batch_size * chunk, num_heads // num_kv_heads
    tile = query_tile((rows - batch_size + 1) * group, head_dim)
    tiles = -(-rows * group // tile) + batch_size - 1
    return num_heads * tiles * tile * (head_dim + 1) * 4 + SLACK_BYTES


def reserve_workspace(model_runner: Any, chunk: int) -> None:
    """Allocate the buffer that SGLang's FlashInfer backend will find, if its own would be too small."""
    import torch
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_buffer

    args, config = model_runner.server_args, model_runner.model_config
    if "flashinfer" not in args.get_attention_backends() or model_runner.use_mla_backend:
        return
    sizes = args.cuda_graph_config.decode.bs or [args.max_running_requests]
    tp_size = model_runner.ps.attn_tp_size
    needed = verify_workspace_bytes(
        min(max(sizes), model_runner.req_to_token_pool.size),
        chunk,
        config.num_attention_heads // tp_size,
        config.get_num_kv_heads(tp_size),
        config.head_dim,
    )
    # SGLang raises its own size to this for some models; a smaller need is left to it.
    if needed > max(envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.get(), 512 << 20):
        logger.info("PSD: %.0f MiB of scratch memory for FlashInfer's verify.", needed / 2**20)
        get_buffer(BUFFER, lambda: torch.empty(needed, dtype=torch.uint8, device=model_runner.device))
