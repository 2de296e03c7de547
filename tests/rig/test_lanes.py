"""A scheduler and its drafter that talk through shared memory, as on a GPU host with many cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rig.oracle import assert_prefixes, make_prompts
from tests.rig.rig import Rig

PROMPTS = make_prompts(9)
LENGTH = 40
QUICK = {"restart": True, "hung_after_s": 5.0}


def spinning_rig(models: Path, **options: Any) -> Rig:
    """A rig whose processes look for messages for a moment before they sleep: both ways of waiting occur."""
    from sglang_psd.drafter import process

    process.spin_time = lambda device: 0.002
    return Rig(models, **options)


def _serve(models: Path, mode: str) -> tuple[list, int, int]:
    from sglang_psd.channel.wires import LaneWire

    with spinning_rig(models, draft="D_same", mode=mode, loop="overlapped") as rig:
        wire = rig.drafter.channel._wire
        assert isinstance(wire, LaneWire)
        outputs = rig.run([(ids, LENGTH, {}) for ids in PROMPTS])
        rig.idle_check()
        accepted = sum(row.gained - 1 for rows in rig.rows for row in rows)
        # Nothing but the first message of each side had to take the sockets.
        return outputs, accepted, wire._reader._sequence


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_text_and_drafts_are_as_over_the_sockets(run_case, models, oracle, mode: str) -> None:
    outputs, accepted, messages = run_case(_serve, models, mode)
    assert_prefixes(outputs, [LENGTH] * len(PROMPTS), oracle.greedy(PROMPTS))
    assert accepted > len(PROMPTS) * LENGTH // 2 and messages > 10


def _lose(models: Path, strike: str) -> tuple[list, list[str], int]:
    """The drafter is killed, or its memory damaged; a successor drafts on."""
    reasons = []
    with spinning_rig(models, spares=1, loop="overlapped", config=QUICK) as rig:
        scheduler, first = rig.scheduler, rig.drafter
        path = first.spec.lanes

        def recovered() -> bool:
            client = scheduler.psd_client
            if client.failure and client.failure not in reasons:
                reasons.append(client.failure)
            return bool(reasons) and client.drafting and rig.drafter is not first

        rids = [rig.submit(ids, LENGTH) for ids in PROMPTS]
        rig.turns(9)
        if strike == "kill":
            first.child.kill()
        else:
            with open(path, "r+b") as file:
                file.seek(64 * (1 if strike == "their counter" else 5))
                file.write(b"\x3f" * 8)
        rig.run_until(lambda: recovered() or not rig.unfinished(), "requests without a drafter")
        rig.run_until(recovered, "a new drafter")
        assert rig.drafter.spec.lanes not in ("", path)
        rids += [rig.submit(ids, LENGTH) for ids in PROMPTS]
        rig.rows.clear()
        rig.run_until_done()
        accepted = sum(row.gained - 1 for rows in rig.rows for row in rows)
        outputs = [rig.output(rid) for rid in rids]
        rig.idle_check(late_allowed=True)
        return outputs, reasons, accepted


@pytest.mark.parametrize(
    ("strike", "words"), [("kill", "ended"), ("their counter", "damaged"), ("our counter", "damaged")]
)
def test_a_successor_has_memory_of_its_own(run_case, models, oracle, strike: str, words: str) -> None:
    outputs, reasons, accepted = run_case(_lose, models, strike)
    assert_prefixes(outputs, [LENGTH] * len(outputs), oracle.greedy(PROMPTS) * 2)
    assert any(words in reason for reason in reasons), reasons
    assert accepted > 0
