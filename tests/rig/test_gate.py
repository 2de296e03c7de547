"""A verify that was queued before its drafts were there and had to go without them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.oracle import assert_prefixes, make_prompts
from tests.rig.rig import Rig

PROMPTS = make_prompts(7)
LENGTH = 24


class ForcedGate:
    """Never holds anything back, as one whose host was stuck; a CPU runs the forward at once."""

    forced = False
    rounds = 0

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        self.forced, self.rounds = True, self.rounds + 1
        yield

    def claim(self) -> bool:
        return not self.forced


def _serve(models: Path, mode: str, always: bool) -> tuple[list, int, int]:
    with Rig(models, draft="D_same", mode=mode, loop="overlapped") as rig:
        worker = rig.scheduler.draft_worker
        prepare, gate = worker._prepare, ForcedGate()
        worker._gate = gate

        def prepare_for_graph(batch):
            if always:
                worker._gate = gate
            return prepare(batch)[0], True

        worker._prepare = prepare_for_graph
        sampled = [(ids, LENGTH, {"temperature": 0.8, "top_p": 0.9}) for ids in PROMPTS[:2]]
        outputs = rig.run([*((ids, LENGTH, {}) for ids in PROMPTS), *sampled])
        rig.idle_check()
        return outputs, sum(row.gained - 1 for rows in rig.rows for row in rows), gate.rounds


@pytest.mark.parametrize(("mode", "always"), [("parallel", True), ("sequential", True), ("parallel", False)])
def test_it_is_right_and_no_draft_counts(run_case, models, oracle, mode: str, always: bool) -> None:
    """Once is enough: verifies after that are not queued ahead, and their drafts count."""
    outputs, accepted, rounds = run_case(_serve, models, mode, always)
    assert_prefixes(outputs[: len(PROMPTS)], [LENGTH] * len(PROMPTS), oracle.greedy(PROMPTS))
    assert [len(output.ids) for output in outputs[len(PROMPTS) :]] == [LENGTH] * 2
    if always:
        assert accepted == 0 and rounds >= LENGTH - 1
    else:
        assert accepted > 0 and rounds == 1
