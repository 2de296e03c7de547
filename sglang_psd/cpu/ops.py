"""PyTorch definitions of the two ``sgl_kernel`` CPU operators that speculation reaches.

The wheels of ``sglang-kernel`` hold GPU code only; the Python wrappers look the operators up in
``torch.ops.sgl_kernel`` when they are called, so defining them late is enough.
"""

import torch

_LIBRARY: torch.library.Library | None = None


def _assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write freshly allocated KV slots into each request's row.

    Row ``r`` of ``req_to_token`` gets its columns ``[start, end)`` from the next ``end - start``
    entries of ``out_cache_loc`` (source: ``sglang/srt/mem_cache/allocation.py``,
    ``assign_req_to_token_pool``).
    """
    offset = 0
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist())
    for row, start, end in bounds:
        req_to_token[row, start:end] = out_cache_loc[offset : offset + end - start].to(req_to_token.dtype)
        offset += end - start


def _copy_all_layer_kv_cache(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Do nothing: only draft trees move KV, and this package drafts chains.

    SGLang calls the operator once, with empty indices, when it builds the pool.
    """
    if tgt_loc.numel() and not torch.equal(tgt_loc, src_loc):
        raise NotImplementedError("Moving KV between slots is not supported on the CPU path.")


def install() -> None:
    """Define the operators once per process, unless another package already did."""
    global _LIBRARY
    if _LIBRARY is not None:
        return
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    schemas = {
        "assign_req_to_token_pool_cpu": (
            "(Tensor req_pool_indices, Tensor(a!) req_to_token, Tensor start_offset, Tensor end_offset, "
            "Tensor out_cache_loc, int pool_len) -> ()",
            _assign_req_to_token_pool,
        ),
        "copy_all_layer_kv_cache_cpu": (
            "(Tensor data_ptrs, Tensor strides, Tensor tgt_loc, Tensor src_loc) -> ()",
            _copy_all_layer_kv_cache,
        ),
    }
    for name, (schema, function) in schemas.items():
        if not hasattr(torch.ops.sgl_kernel, name):
            library.define(name + schema)
            library.impl(name, function, "CPU")
    _LIBRARY = library
