"""The endurance script, short: enough to keep it working and to find a leak of one slot in two hundred requests."""

from __future__ import annotations

from scripts.endurance import NUM_PROMPTS, endure
from tests.rig.oracle import make_prompts


def test_two_hundred_requests_and_three_attacks(run_case, models, oracle) -> None:
    truth = oracle.greedy(make_prompts(NUM_PROMPTS))
    found = run_case(endure, models, truth, 200, 3, 7)
    assert found["wrong"] == [] and found["most_held_after_a_window"] == 0
    assert found["aborted"] >= 5 and found["retractions"] > 0
    assert [strike["kind"] for strike in found["strikes"]] == ["kill", "stop", "kill"]
    assert all(strike["recovery_s"] for strike in found["strikes"])
