"""Streaming sessions: what a request leaves to the next turn must be KV of committed tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def release_draft_room(cache: Any, req: Req) -> None:
    """Give back the room for drafts of a request whose KV a streaming session takes over.

    The session takes every slot up to the last token as filled; that token's own KV is not computed yet, and the slot
    behind it, reserved for drafts, holds a rejected one's.

    Parameters
    ----------
    cache : StreamingSession
        ``sglang/srt/session/streaming_session.py``.
    req : Req
        Finished or retracted: the session takes both over alike.
    """
    if req.session is None or not req.session.streaming:
        return
    pool, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    start = -(-req.kv_committed_len // allocator.page_size) * allocator.page_size
    if start < req.kv.kv_allocated_len:
        allocator.free(pool.req_to_token[req.req_pool_idx, start : req.kv.kv_allocated_len].to(torch.int64))
    req.kv.kv_allocated_len = min(req.kv.kv_allocated_len, req.kv_committed_len)
