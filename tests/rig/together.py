"""Requests that run side by side, and what of them has to equal the plain server's answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rig.oracle import make_prompts
from tests.rig.rig import Ask, Output, Rig

LOOPS = ("synchronous", "overlapped")
PROMPTS = make_prompts(8)


def together(
    models: Path, draft: str, k: int, loop: str, asks: Sequence[Ask], **options: Any
) -> tuple[list[Output], list[list[int]]]:
    """Outputs of ``asks``, submitted at once, and the number of drafts in each of their rounds."""
    with Rig(models, draft, k, loop=loop, **options) as rig:
        rids = [rig.submit(ids, length, **wishes) for ids, length, wishes in asks]
        rig.run_until_done()
        rig.idle_check()
        drafts = [[row.drafts for row in rig.rounds_of(rid)] for rid in rids]
        return [rig.output(rid) for rid in rids], drafts


def plain(models: Path, asks: Sequence[Ask], **options: Any) -> list[Output]:
    """Answers of SGLang without speculation, one request at a time, on a server with ``options``."""
    with Rig(models, None, disable_radix_cache=True, **options) as rig:
        return rig.run_each(asks)


def assert_same(found: Sequence[Output], expected: Sequence[Output], asks: Sequence[Ask]) -> None:
    """Tokens through the stop, finish reason and usage; one log probability for every token."""
    for ask, ours, theirs in zip(asks, found, expected, strict=True):
        assert (ours.ids, ours.finish) == (theirs.ids, theirs.finish), f"{ask[1:]} differs"
        assert ours.usage == len(ours.ids), f"{ask[1:]}: {ours.usage} tokens counted, {len(ours.ids)} sent"
        assert ours.reasoning == theirs.reasoning <= ours.usage
        assert len(ours.logprobs) in (0, len(ours.ids))


CLOSE = 1e-4


def assert_same_values(found: Sequence[Output], expected: Sequence[Output], close: float = CLOSE) -> None:
    """Log probabilities of output and prompt, alternatives and chosen ids, as good as equal (within ``close``)."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=close)
        assert ours.input_logprobs == pytest.approx(theirs.input_logprobs, abs=close)
        for name in ("top_logprobs", "token_ids_logprobs"):
            rows, plain_rows = getattr(ours, name), getattr(theirs, name)
            assert len(rows) == len(plain_rows), name
            for row, plain_row in zip(rows, plain_rows):
                assert [value for value, _ in row] == pytest.approx([value for value, _ in plain_row], abs=close), name
                if name == "top_logprobs":
                    assert_same_alternatives(row, plain_row, close)
                else:
                    assert [token for _, token in row] == [token for _, token in plain_row], name


def assert_same_alternatives(
    row: Sequence[tuple[float, int]], plain_row: Sequence[tuple[float, int]], close: float = CLOSE
) -> None:
    """The same best tokens; two that are as good as equal may stand in either order, and either may be the last one."""
    ours, theirs = ({token: value for value, token in each} for each in (row, plain_row))
    for token in ours.keys() | theirs.keys():
        mine, other = ours.get(token, row[-1][0]), theirs.get(token, plain_row[-1][0])
        assert mine == pytest.approx(other, abs=close), f"top_logprobs: {token} in {row}, {plain_row}"
