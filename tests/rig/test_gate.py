"""A verify that was queued before its drafts were there and had to go without them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.oracle import assert_prefixes, make_prompts
from tests.rig.rig import Rig
from tests.rig.test_eagle import TARGET_OF

PROMPTS = make_prompts(7)
LENGTH = 24


class ForcedGate:
    """Never holds anything back, as one whose host was stuck; a CPU runs the forward at once."""

    forced = False
    rounds = 0

    def __init__(self, slots: list) -> None:
        self._slots = slots

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Only while nobody can come to need the device."""
        assert not any(slot.in_flight.needs_device for slot in self._slots if slot.in_flight is not None)
        self.forced, self.rounds = True, self.rounds + 1
        yield

    def claim(self) -> bool:
        return not self.forced


def _serve(models: Path, draft: str, mode: str, always: bool, slow: bool) -> tuple[list, int, int]:
    with Rig(models, draft, mode=mode, loop="overlapped", target=TARGET_OF.get(draft, "T")) as rig:
        worker = rig.scheduler.draft_worker
        prepare, gate = worker._prepare, ForcedGate(rig.scheduler.psd_slots)
        worker._gate = gate

        def prepare_for_graph(batch):
            if always:
                worker._gate = gate
            return prepare(batch)[0], True

        worker._prepare = prepare_for_graph
        if slow:  # the other slot's forward is never over when this one's is launched
            rig.scheduler._psd_collect_ready = lambda slot: None
        sampled = [(ids, LENGTH, {"temperature": 0.8, "top_p": 0.9}) for ids in PROMPTS[:2]]
        outputs = rig.run([*((ids, LENGTH, {}) for ids in PROMPTS), *sampled])
        rig.idle_check()
        return outputs, sum(row.gained - 1 for rows in rig.rows for row in rows), gate.rounds


@pytest.mark.parametrize(
    ("draft", "mode", "always"),
    [
        ("D_same", "parallel", True),
        ("D_same", "sequential", True),
        ("D_same", "parallel", False),
        ("B_e1", "sequential", True),
        ("B_e1", "parallel", True),
    ],
)
def test_it_is_right_and_no_draft_counts(run_case, models, oracle, draft: str, mode: str, always: bool) -> None:
    """Once is enough: verifies after that are not queued ahead, and their drafts count."""
    outputs, accepted, rounds = run_case(_serve, models, draft, mode, always, slow=False)
    _assert_right(outputs, oracle, draft)
    if always:
        assert accepted == 0 and rounds >= LENGTH - 1
    else:
        assert accepted > 0 and rounds == 1


def test_nothing_is_queued_ahead_of_hidden_states(run_case, models, oracle) -> None:
    """Those of the other slot are handed over while a verify waits for its drafts."""
    outputs, accepted, rounds = run_case(_serve, models, "B_e1", "parallel", True, slow=True)
    _assert_right(outputs, oracle, "B_e1")
    assert accepted > 0 and rounds < LENGTH


def _assert_right(outputs: list, oracle, draft: str) -> None:
    truth = oracle.greedy(PROMPTS, target=TARGET_OF.get(draft, "T"))
    assert_prefixes(outputs[: len(PROMPTS)], [LENGTH] * len(PROMPTS), truth)
    assert [len(output.ids) for output in outputs[len(PROMPTS) :]] == [LENGTH] * 2
