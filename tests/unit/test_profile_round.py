"""Stamps of two processes become one round."""

from __future__ import annotations

from scripts.profile_round import profile


def test_steps_are_placed_after_the_result_before() -> None:
    target, drafter = [], []
    for i in range(4):
        start = 10.0 + 0.02 * i
        target.append(("ForwardTimer.wait", start - 0.005, start, 0))
        target.append(("PSDWorker._verify", start + 0.004, start + 0.012, 3))
        drafter.append(("DraftEngine.draft_known", start + 0.001, start + 0.003, 0))
        drafter += [("ChainGraphs._plan", start + 0.001 + 1e-4 * k, start + 0.001 + 2e-4 * k, 0) for k in (1, 2)]
    drafter.append(("DrafterLoop._send", 10.003, 10.004, 0))  # in one round of three: nothing usual
    found = profile([target, drafter])
    assert list(found) == ["3"] and found["3"]["rounds"] == 3 and found["3"]["round_ms"] == 20.0
    names = [step["name"] for step in found["3"]["steps"]]
    assert names == [
        "DraftEngine.draft_known 1",
        "ChainGraphs._plan 1",
        "ChainGraphs._plan 2",
        "PSDWorker._verify 1",
        "ForwardTimer.wait 1",
    ]
    first = found["3"]["steps"][0]
    assert (first["begin_ms"], first["end_ms"], first["rounds"]) == (1.0, 3.0, 3)


def test_long_pauses_and_other_forwards_are_left_out() -> None:
    stamps = [("ForwardTimer.wait", end - 0.001, end, 0) for end in (1.0, 1.01, 1.02, 2.0)]
    stamps += [("PSDWorker._verify", 1.012, 1.018, 8), ("PSDWorker._verify", 1.5, 1.6, 8)]
    found = profile([stamps])
    assert list(found) == ["8"] and found["8"]["rounds"] == 1
    assert profile([]) == {}
