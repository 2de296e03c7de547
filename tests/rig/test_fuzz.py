"""Random traffic on random servers, request by request against SGLang without speculation.

Greedy texts, finish reasons, usage, log probabilities and hidden states are the plain server's; seeded texts are those
of a server without drafter; of sampled ones no token may stand behind an end. Drafts of the target's own weights are
right, and those of an EAGLE head are its replica's. CI runs fixed scenarios of eighty requests, of both generators.
``PSD_FUZZ=N`` runs N others, the first made from the number ``PSD_FUZZ_FROM`` by the generator ``PSD_FUZZ_OF``
(``traffic`` or ``wide``), goes on after failures, and writes what it saw to ``fuzz_cpu.json`` or ``fuzz_wide_cpu.json``
in the folder ``PSD_RESULTS``. Numbers of scenarios that failed stay below in ``FOUND``.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from scripts.record_result import machine
from tests.rig.fuzz import Scenario, random_scenario, scenarios
from tests.rig.fuzz_compare import check
from tests.rig.fuzz_wide import wide_scenario

CALLS = 80
CI_SCENARIOS = 13
CI_WIDE = range(12)
GENERATORS = {"traffic": random_scenario, "wide": wide_scenario}
FUZZ = int(os.environ.get("PSD_FUZZ", "0"))
FUZZ_FROM = int(os.environ.get("PSD_FUZZ_FROM", "0"))
FUZZ_OF = os.environ.get("PSD_FUZZ_OF", "traffic")
# Generator and number of scenarios that once failed.
FOUND: tuple[tuple[str, int], ...] = (("traffic", 224), ("traffic", 7004), ("wide", 504), ("wide", 638), ("wide", 9033))
PROFILE = settings(
    max_examples=CI_SCENARIOS,
    derandomize=True,
    deadline=None,
    database=None,
    # A scenario takes seconds: shrinking one would take an hour, and its calls hardly depend on each other.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


@given(scenarios(CALLS))
@PROFILE
@pytest.mark.timeout(900)
def test_random_traffic(run_case, models, scenario) -> None:
    check(run_case, models, scenario)


@pytest.mark.parametrize("number", CI_WIDE)
def test_wide_traffic(run_case, models, number) -> None:
    check(run_case, models, wide_scenario(Random(number), CALLS))


@pytest.mark.parametrize(("generator", "number"), FOUND)
def test_traffic_that_once_failed(run_case, models, generator, number) -> None:
    check(run_case, models, GENERATORS[generator](Random(number), CALLS))


@pytest.mark.skipif(not FUZZ, reason="set PSD_FUZZ to a number of scenarios")
@pytest.mark.timeout(3600 * 12)
def test_much_random_traffic(run_case, models) -> None:
    failed: dict[int, str] = {}
    kinds: Counter[str] = Counter()
    distinct: set[str] = set()
    begin = time.monotonic()
    for number in range(FUZZ_FROM, FUZZ_FROM + FUZZ):
        scenario: Scenario = GENERATORS[FUZZ_OF](Random(number), CALLS)
        try:
            check(run_case, models, scenario)
        except AssertionError as error:
            failed[number] = str(error)[:4000].replace(f"{Path(__file__).parents[2]}/", "")
        kinds.update(call.kind for call in scenario.calls)
        distinct.update(map(repr, scenario.calls))
        _record(number + 1 - FUZZ_FROM, kinds, len(distinct), failed, time.monotonic() - begin)
    assert not failed, "\n".join(f"scenario {number}: {said}" for number, said in failed.items())


def _record(done: int, kinds: Counter[str], distinct: int, failed: dict[int, str], seconds: float) -> None:
    folder = os.environ.get("PSD_RESULTS")
    if not folder:
        return
    which = "" if FUZZ_OF == "traffic" else f"PSD_FUZZ_OF={FUZZ_OF} "
    found = {
        "command": f"{which}PSD_FUZZ={FUZZ} PSD_FUZZ_FROM={FUZZ_FROM} PSD_RESULTS={folder} "
        "python -m pytest tests/rig/test_fuzz.py -k much",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine(),
        "scenarios": done,
        "requests": sum(kinds.values()),
        "distinct_requests": distinct,
        "kinds": dict(kinds),
        "scenarios_failed": failed,
        "seconds": round(seconds),
    }
    name = "fuzz_cpu.json" if FUZZ_OF == "traffic" else f"fuzz_{FUZZ_OF}_cpu.json"
    Path(folder, name).write_text(json.dumps(found, indent=1) + "\n")
