"""Scratch memory of FlashInfer's verify."""

from __future__ import annotations

import pytest

from sglang_psd.target.workspace import SLACK_BYTES, query_tile, verify_workspace_bytes

# Query heads, KV heads, head size of the Qwen3-32B shape.
QWEN3_32B = (64, 8, 128)


@pytest.mark.parametrize(
    ("packed_len", "head_dim", "tile"),
    [(8, 128, 16), (16, 128, 16), (17, 128, 64), (65, 128, 128), (65, 256, 64), (32, 512, 16), (33, 512, 32)],
)
def test_query_tile(packed_len: int, head_dim: int, tile: int) -> None:
    assert query_tile(packed_len, head_dim) == tile


def test_full_batch_needs_more_than_sglang_reserves() -> None:
    """128 requests, 3 drafts: 32 full tiles and one partial tile for each request but one."""
    partial_results = 64 * 159 * 128 * 129 * 4
    assert verify_workspace_bytes(128, 4, *QWEN3_32B) == partial_results + SLACK_BYTES
    assert partial_results > 512 << 20


def test_need_grows_with_batch_and_shrinks_with_ranks() -> None:
    sizes = [verify_workspace_bytes(batch, 4, *QWEN3_32B) for batch in (1, 8, 64, 128, 256)]
    assert sizes == sorted(sizes)
    assert verify_workspace_bytes(128, 4, 32, 4, 128) < sizes[3]
