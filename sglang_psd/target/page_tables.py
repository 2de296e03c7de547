"""Flash attention's page tables, wide enough for a verify at the context's end.

A verify reads K tokens past the last committed one; some may lie beyond the context, where their results are never
used. SGLang sizes this backend's page tables by the context
(``sglang/srt/layers/attention/flashattention_backend.py``), and the kernel that fills them knows no bound
(``sglang/kernels/ops/kvcache/trtllm_mha_page_table.py``): a row too long for its table goes on in the next request's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def widen_page_tables(backend: Any, chunk: int) -> None:
    """Make room for ``chunk`` tokens behind the context; to be called before any CUDA graph is captured.

    Parameters
    ----------
    backend : AttentionBackend
        The target's; others than flash attention, alone or within a hybrid one, are left as they are.
    chunk : int
        Tokens per request of a verify, K + 1.
    """
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    for part in _parts(backend):
        if isinstance(part, FlashAttentionBackend):
            part.max_context_len += chunk
            part.max_num_pages = -(-part.max_context_len // part.page_size)


def _parts(backend: Any) -> Iterator[Any]:
    """A backend and the backends that it is made of, each once."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    found: dict[int, Any] = {}
    waiting = [backend]
    while waiting:
        part = waiting.pop()
        if isinstance(part, (list, tuple)):
            waiting += part
        elif isinstance(part, AttentionBackend) and id(part) not in found:
            found[id(part)] = part
            waiting += vars(part).values()
    yield from found.values()
