"""Random traffic on random servers, request by request against SGLang without speculation.

Greedy texts, finish reasons, usage and log probabilities are the plain server's; seeded texts are those of a server
without drafter; of sampled ones no token may stand behind an end. CI runs fixed scenarios of eighty requests.
``PSD_FUZZ=N`` runs N others, the first made from the number ``PSD_FUZZ_FROM``, goes on after failures, and writes what
it saw to ``fuzz_cpu.json`` in the folder ``PSD_RESULTS``. Numbers of scenarios that failed stay below in ``FOUND``.
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
from tests.rig.fuzz import Call, Scenario, random_scenario, scenarios
from tests.rig.received import Output
from tests.rig.rig import Rig
from tests.rig.together import assert_same_values

CALLS = 80
CI_SCENARIOS = 25
FUZZ = int(os.environ.get("PSD_FUZZ", "0"))
FUZZ_FROM = int(os.environ.get("PSD_FUZZ_FROM", "0"))
# Numbers of scenarios that once failed.
FOUND: tuple[int, ...] = (224,)
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


def _serve(models: Path, scenario: Scenario) -> tuple[list[Output], dict[int, Output]]:
    """Outputs of all calls; and of the seeded ones again, on the same server, without a drafter."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    with Rig(models, scenario.draft, scenario.k, scenario.mode, scenario.loop, **scenario.options) as rig:
        rids, due = [], {}
        for number, call in enumerate(scenario.calls):
            rig.turns(call.wait)
            if number in scenario.pauses:
                rig.tell(PauseGenerationReqInput(mode=scenario.pauses[number]))
                rig.turns(2)
                rig.tell(ContinueGenerationReqInput())
            ids, length, wish = call.ask
            rids.append(rig.submit(ids, length, **wish))
            if call.abort is not None:
                due[rids[-1]] = call.abort
            for rid in [rid for rid, turns in due.items() if turns <= 0]:
                rig.abort(rid)
                del due[rid]
            due = {rid: turns - call.wait - 1 for rid, turns in due.items()}
        rig.run_until_done()
        # A busy machine lets the drafter be late: its drafts are missed then, and nothing else.
        rig.idle_check(late_allowed=True)
        outputs = [rig.output(rid) for rid in rids]
        seeded = [i for i, call in enumerate(scenario.calls) if call.kind == "seeded"]
        rig.scheduler.psd_client._fail("the test wants none")
        again = rig.run([scenario.calls[i].ask for i in seeded])
        return outputs, dict(zip(seeded, again))


def _plain(models: Path, scenario: Scenario, numbers: list[int], alone: bool) -> dict[int, Output]:
    options = {name: scenario.options[name] for name in ("grammar_backend", "reasoning_parser")}
    options["disable_radix_cache"] = True
    with Rig(models, None, **options) as rig:
        asks = [scenario.calls[i].ask for i in numbers]
        return dict(zip(numbers, rig.run_each(asks) if alone else rig.run(asks)))


def agree(call: Call, ours: Output, theirs: Output) -> bool:
    """Whether a request got what it should have got."""
    if ours.finish is not None and ours.finish["type"] == "abort" and call.abort is not None:
        # While its grammar is compiled SGLang ends a request by giving it a prompt of one token, and answers that.
        waited = ours.finish.get("message") == "Aborted by AbortReq."
        return waited or ours.ids == theirs.ids[: len(ours.ids)]
    return (ours.ids, ours.finish, ours.reasoning) == (theirs.ids, theirs.finish, theirs.reasoning)


def assert_ends_where_it_says(call: Call, output: Output) -> None:
    """Counts fit, and nothing stands behind an end."""
    assert output.finish is not None
    if output.finish["type"] == "abort":
        assert call.abort is not None, (call, output.finish)
        return
    assert output.usage == len(output.ids) <= call.length
    assert len(output.logprobs) == (len(output.ids) if call.wish.get("logprobs") else 0)
    assert output.rounds + output.accepted >= output.usage - 1 - output.retractions
    stops = set(call.wish.get("stop_token_ids", ()))
    if not call.wish.get("ignore_eos", True):
        first = next((i for i, token in enumerate(output.ids) if token in stops), None)
        assert first in (None, len(output.ids) - 1), (call, output)
    least = call.wish.get("min_new_tokens", 0)
    if output.finish["type"] == "stop" and isinstance(output.finish.get("matched"), int):
        assert len(output.ids) > least, (call, output)


def check(run_case, models: Path, scenario: Scenario) -> None:
    """Serve a scenario and compare all of it."""
    outputs, seeded = run_case(_serve, models, scenario, timeout_s=300)
    greedy = [i for i, call in enumerate(scenario.calls) if call.kind == "greedy"]
    expected = run_case(_plain, models, scenario, greedy, False)
    odd = [i for i in greedy if not agree(scenario.calls[i], outputs[i], expected[i])]
    if odd:
        # The plain server itself may round differently in a batch: one at a time is what counts.
        expected.update(run_case(_plain, models, scenario, odd, True))
    for i, call in enumerate(scenario.calls):
        assert_ends_where_it_says(call, outputs[i])
        right = expected.get(i) or seeded.get(i)
        if right is not None:
            assert agree(call, outputs[i], right), f"{i}: {call}\nours   {outputs[i]}\nright  {right}"
    whole = [i for i in greedy if scenario.calls[i].abort is None]
    assert_same_values([outputs[i] for i in whole], [expected[i] for i in whole])


@given(scenarios(CALLS))
@PROFILE
@pytest.mark.timeout(900)
def test_random_traffic(run_case, models, scenario) -> None:
    check(run_case, models, scenario)


@pytest.mark.parametrize("number", FOUND)
def test_traffic_that_once_failed(run_case, models, number) -> None:
    check(run_case, models, random_scenario(Random(number), CALLS))


@pytest.mark.skipif(not FUZZ, reason="set PSD_FUZZ to a number of scenarios")
@pytest.mark.timeout(3600 * 12)
def test_much_random_traffic(run_case, models) -> None:
    failed: dict[int, str] = {}
    kinds: Counter[str] = Counter()
    distinct: set[str] = set()
    begin = time.monotonic()
    for number in range(FUZZ_FROM, FUZZ_FROM + FUZZ):
        scenario = random_scenario(Random(number), CALLS)
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
    found = {
        "command": f"PSD_FUZZ={FUZZ} PSD_FUZZ_FROM={FUZZ_FROM} PSD_RESULTS={folder} "
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
    Path(folder, "fuzz_cpu.json").write_text(json.dumps(found, indent=1) + "\n")
