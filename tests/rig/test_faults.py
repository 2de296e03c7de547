"""Whatever happens to the drafter or its wire: every request gets the plain text, and drafting comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rig import sabotage
from tests.rig.oracle import assert_prefixes, make_prompts
from tests.rig.proxy import FAULTS
from tests.rig.rig import Output, Rig

PROMPTS = make_prompts(9)
LENGTH = 40
# A hung drafter is lost after this long here, in place of 20 s; nothing waits longer than the timeout.
QUICK = {"restart": True, "hung_after_s": 2.0, "draft_timeout_s": 1.0}


def stop(rig: Rig) -> None:
    """SIGSTOP: the process is there and does nothing."""
    rig.drafter.child.send_signal(signal.SIGSTOP)


def kill(rig: Rig) -> None:
    """SIGKILL."""
    rig.drafter.child.kill()


def remove_socket_and_kill(rig: Rig) -> None:
    """The socket file goes first; the successor has one of its own."""
    os.unlink(rig.drafter._endpoint.path)
    kill(rig)


def nothing(rig: Rig) -> None:
    """The sabotage is all."""


@dataclass
class Outcome:
    """What a case showed.

    Attributes
    ----------
    outputs : list of Output
    states, reasons : list of str
        States the supervisor went through; why drafters were lost.
    accepted : int
        Drafts accepted after the recovery.
    report : dict
        ``/server_info`` at the end.
    """

    outputs: list[Output]
    states: list[str]
    reasons: list[str]
    accepted: int
    report: dict


def finish(rig: Rig, rids: list[str]) -> list[Output]:
    rig.run_until_done()
    return [rig.output(rid) for rid in rids]


def lose_and_recover(
    models: Path,
    strike: Callable[[Rig], None],
    sabotages: list | None,
    spares: int,
    turns: int = 9,
    loop: str = "overlapped",
    **models_of: str,
) -> Outcome:
    """Requests run, the drafter is struck, more requests run until its successor drafts for them."""
    states, reasons = ["up"], []
    with Rig(models, loop=loop, spares=spares, sabotage=sabotages, config=QUICK, **models_of) as rig:
        scheduler = rig.scheduler

        def recovered() -> bool:
            client, state = scheduler.psd_client, scheduler.psd_supervisor.state
            if state != states[-1]:
                states.append(state)
            if client.failure and client.failure not in reasons:
                reasons.append(client.failure)
            return bool(reasons) and client.drafting and state == "up"

        first = rig.drafter.pid
        rids = [rig.submit(ids, LENGTH) for ids in PROMPTS[:7]]
        rig.turns(turns)
        strike(rig)
        # Half of the work is done while the drafter is away, the rest by its successor.
        rig.run_until(lambda: recovered() or not rig.unfinished(), "requests without a drafter")
        rig.run_until(recovered, "a new drafter")
        assert rig.drafter.pid != first
        rids += [rig.submit(ids, LENGTH) for ids in PROMPTS]
        rig.rows.clear()
        outputs = finish(rig, rids)
        accepted = sum(row.gained - 1 for rows in rig.rows for row in rows)
        rig.idle_check(late_allowed=True)
        return Outcome(outputs, states, reasons, accepted, scheduler.psd_report())


LOSSES: dict[str, tuple] = {
    "SIGKILL": (kill, None, "ended"),
    "SIGSTOP": (stop, None, "not answered"),
    "socket file removed": (remove_socket_and_kill, None, "ended"),
    "crash in a prefill": (nothing, sabotage.die_in_prefill, "ended"),
    "crash in a round": (nothing, sabotage.die_in_round, "ended"),
    "out of memory in a round": (nothing, sabotage.no_memory_in_round, "alloc"),
    "main thread hangs": (nothing, sabotage.hang_in_round, "not answered"),
    "leaking pool": (nothing, sabotage.leak_kv, "KV tokens are held"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_lost_drafter_comes_back(run_case, models, oracle, name) -> None:
    strike, broken, reason = LOSSES[name]
    outcome = run_case(lose_and_recover, models, strike, [broken], 1)
    truth = oracle.greedy(PROMPTS)
    assert_prefixes(outcome.outputs, [LENGTH] * 16, truth[:7] + truth)
    assert outcome.states == ["up", "waiting", "starting", "up"]
    assert len(outcome.reasons) == 1 and reason in outcome.reasons[0]
    assert outcome.accepted > 50, "the new drafter's drafts are of no use"
    assert outcome.report["mode"] == "parallel" and outcome.report["drafter"]["restarts"] == 1


@pytest.mark.parametrize("phase", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("loop", ["synchronous", "overlapped"])
def test_sigkill_in_every_phase(run_case, models, oracle, loop, phase) -> None:
    """Before the first turn, in either prefill, between rounds of either slot."""
    outcome = run_case(lose_and_recover, models, kill, None, 1, phase, loop)
    truth = oracle.greedy(PROMPTS)
    assert_prefixes(outcome.outputs, [LENGTH] * 16, truth[:7] + truth)
    assert outcome.accepted > 50


def test_a_successor_that_cannot_load_is_tried_again(run_case, models, oracle) -> None:
    """Out of memory at start, then a crash at start, then one that works."""
    broken = [None, sabotage.no_memory_at_start, sabotage.die_at_start]
    outcome = run_case(lose_and_recover, models, kill, broken, 3)
    truth = oracle.greedy(PROMPTS)
    assert_prefixes(outcome.outputs, [LENGTH] * 16, truth[:7] + truth)
    assert outcome.states == ["up", *["waiting", "starting"] * 3, "up"]
    assert outcome.report["drafter"]["restarts"] == 3 and outcome.accepted > 50


def test_a_drafter_lost_while_idle_is_there_for_the_next_request(run_case, models, oracle) -> None:
    def case() -> list[Output]:
        with Rig(models, spares=1, config=QUICK, loop="overlapped") as rig:
            rids = [rig.submit(ids, LENGTH) for ids in PROMPTS]
            rig.run_until_done()
            rig.turns(3)
            kill(rig)
            scheduler = rig.scheduler
            rig.run_until(lambda: not scheduler.psd_client.usable, "the loss to be noticed")
            rig.run_until(lambda: scheduler.psd_client.drafting, "a new drafter")
            rig.rows.clear()
            rids += [rig.submit(ids, LENGTH) for ids in PROMPTS]
            outputs = finish(rig, rids)
            assert sum(row.drafts for rows in rig.rows for row in rows) > 100
            rig.idle_check(late_allowed=True)  # in QUICK a round waits for a second only
            return outputs

    truth = oracle.greedy(PROMPTS)
    assert_prefixes(run_case(case), [LENGTH] * 18, truth + truth)


def test_a_short_stop_is_waited_out_without_a_restart(run_case, models, oracle) -> None:
    """SIGSTOP, then SIGCONT: rounds go on without drafts at once, the process stays, and drafts come back."""

    def case() -> tuple[list[Output], int, dict]:
        with Rig(models, config={**QUICK, "hung_after_s": 60.0}, loop="overlapped") as rig:
            client, first = rig.scheduler.psd_client, rig.drafter.pid
            rids = [rig.submit(ids, LENGTH) for ids in PROMPTS[:7]]
            rig.turns(9)
            stop(rig)
            rig.run_until(lambda: not client.drafting, "the stop to be noticed", within_s=10)
            assert rig.scheduler.psd_report()["mode"] == "off"
            rig.run_until_done()
            rig.drafter.child.send_signal(signal.SIGCONT)
            rig.run_until(lambda: client.drafting, "the drafter to answer again")
            assert rig.drafter.pid == first
            rig.rows.clear()
            rids += [rig.submit(ids, LENGTH) for ids in PROMPTS]
            outputs = finish(rig, rids)
            drafts = sum(row.drafts for rows in rig.rows for row in rows)
            rig.idle_check(late_allowed=True)
            return outputs, drafts, rig.scheduler.psd_report()

    outputs, drafts, report = run_case(case)
    truth = oracle.greedy(PROMPTS)
    assert_prefixes(outputs, [LENGTH] * 16, truth[:7] + truth)
    assert drafts > 100 and report["mode"] == "parallel" and report["drafter"]["restarts"] == 0


def test_the_breaker_ends_in_off(run_case, models, oracle) -> None:
    """As many losses as allowed: no further attempt, a reason in the report, and serving goes on."""

    def case() -> tuple[list[Output], dict]:
        with Rig(models, spares=3, config={**QUICK, "max_losses": 2}, loop="overlapped") as rig:
            scheduler, rids = rig.scheduler, []
            for _ in range(2):
                rids += [rig.submit(ids, LENGTH) for ids in PROMPTS]
                rig.turns(9)
                kill(rig)
                rig.run_until(lambda: not scheduler.psd_client.usable, "the loss to be noticed")
                rig.run_until(
                    lambda: scheduler.psd_client.drafting or scheduler.psd_supervisor.given_up, "a new one or the end"
                )
            rids += [rig.submit(ids, LENGTH) for ids in PROMPTS]
            outputs = finish(rig, rids)
            rig.turns(20)
            return outputs, scheduler.psd_report()

    outputs, report = run_case(case)
    assert_prefixes(outputs, [LENGTH] * 27, oracle.greedy(PROMPTS) * 3)
    assert report["mode"] == "off" and report["drafter"]["state"] == "given up" and report["drafter"]["failure"]
    assert report["drafter"]["restarts"] == 1


# --- acceptance ----------------------------------------------------------------------------------


def run_watched(models: Path, broken: Callable[[], None], requests: int) -> tuple[list[Output], dict, float]:
    """Many requests over small windows; returns outputs, report and the accept rate of the last window.

    Requests go on until acceptance is well again after it had collapsed, or drafting has ended: where the machine is
    busy, rounds run without drafts, and windows take longer to fill.
    """
    from sglang_psd.scheduler import acceptance_watch
    from sglang_psd.scheduler.acceptance_watch import Verdict

    acceptance_watch.WINDOW_DRAFTS = 150
    judge, verdicts = acceptance_watch.AcceptanceWatch._judge, []

    def note(self):
        verdicts.append(judge(self))
        return verdicts[-1]

    acceptance_watch.AcceptanceWatch._judge = note  # type: ignore[method-assign]
    with Rig(models, "D_same", sabotage=broken, config={"acceptance_floor": 0.3}, loop="overlapped") as rig:
        outputs: list[Output] = []

        def settled() -> bool:
            well = rig.scheduler.psd_watch.latest > 0.9
            return Verdict.REOPEN in verdicts and (well or Verdict.OFF in verdicts)

        while len(outputs) < 10 * requests and not settled():
            outputs += finish(rig, [rig.submit(PROMPTS[i % 9], 48) for i in range(requests)])
        rig.turns(3)
        return outputs, rig.scheduler.psd_report(), rig.scheduler.psd_watch.latest


def test_collapsed_acceptance_is_mended_by_opening_again(run_case, models, oracle) -> None:
    outputs, report, latest = run_case(run_watched, models, sabotage.scramble_requests, 63)
    assert_prefixes(outputs, [48] * len(outputs), oracle.greedy(PROMPTS) * (len(outputs) // 9))
    assert report["mode"] == "parallel" and latest > 0.9


def test_acceptance_that_stays_collapsed_ends_drafting(run_case, models, oracle) -> None:
    outputs, report, latest = run_case(run_watched, models, sabotage.spoil_weights, 63)
    assert_prefixes(outputs, [48] * len(outputs), oracle.greedy(PROMPTS) * (len(outputs) // 9))
    assert report["mode"] == "off" and report["drafter"]["state"] == "given up" and latest < 0.1
    assert "accept rate" in report["drafter"]["failure"]


# --- the wire ------------------------------------------------------------------------------------


@dataclass
class WireOutcome:
    """What a bad wire led to.

    Attributes
    ----------
    outputs : list of Output
        Of requests on the bad wire, then of as many on the good one.
    harmed, drafts : int
        Frames that the wire changed; drafts after it had become good.
    agreed_s : float
        Seconds from the good wire until both sides had compared notes.
    report : dict
        ``/server_info`` at the end.
    """

    outputs: list[Output]
    harmed: int
    drafts: int
    agreed_s: float
    report: dict


def run_on_a_bad_wire(models: Path, name: str, loop: str, seed: int = 0, **models_of: str) -> WireOutcome:
    """Serve on a bad wire, then on a good one."""
    from sglang_psd.scheduler import vitals

    vitals.PING_EVERY_S = 0.1
    config = {**QUICK, "draft_timeout_s": 0.15, "hung_after_s": 20.0}
    with Rig(models, fault=(FAULTS[name], seed), spares=1, config=config, loop=loop, **models_of) as rig:
        scheduler, proxy = rig.scheduler, rig.drafter.proxy
        rids = [rig.submit(ids, LENGTH) for ids in PROMPTS]
        rig.run_until_done()
        proxy.heal()
        harmed = proxy.to_drafter.harmed + proxy.to_scheduler.harmed
        # A lost pong is made up for by the next ping; a lost Close shows when both sides compare notes.
        good_since = time.monotonic()
        rig.run_until(lambda: scheduler.psd_client.drafting, "drafts again")
        rig.ask_drafter()  # at this point of the stream both sides compare what is open
        agreed_s = time.monotonic() - good_since
        rig.rows.clear()
        rids += [rig.submit(ids, LENGTH) for ids in PROMPTS]
        outputs = finish(rig, rids)
        drafts = sum(row.drafts for rows in rig.rows for row in rows)
        rig.idle_check(late_allowed=True)
        return WireOutcome(outputs, harmed, drafts, agreed_s, scheduler.psd_report())


@pytest.mark.parametrize("loop", ["synchronous", "overlapped"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_wire(run_case, models, oracle, name, loop) -> None:
    outcome = run_case(run_on_a_bad_wire, models, name, loop)
    assert outcome.harmed > 5, "the wire was good"
    assert_prefixes(outcome.outputs, [LENGTH] * 18, oracle.greedy(PROMPTS) * 2)
    assert outcome.drafts > 150 and outcome.report["mode"] == "parallel"
    # A bad wire is no reason to lose a drafter; a changed byte may happen to say that it has failed.
    assert name == "corrupted" or outcome.report["drafter"]["restarts"] == 0


# --- around it -----------------------------------------------------------------------------------


def test_a_full_disk_ends_the_trace_and_nothing_else(run_case, models, oracle) -> None:
    def case() -> list[Output]:
        with Rig(models, config={"trace": "/dev/full"}, loop="overlapped") as rig:
            outputs = rig.run([(ids, LENGTH, {}) for ids in PROMPTS])
            rig.idle_check()
            return outputs

    assert_prefixes(run_case(case), [LENGTH] * 9, oracle.greedy(PROMPTS))


def test_a_name_that_no_message_can_hold(run_case, models, oracle) -> None:
    """A lone surrogate is valid JSON: the request is served without drafts, and offered to the drafter once."""

    def case() -> tuple[list[Output], list[str]]:
        with Rig(models, loop="overlapped") as rig:
            client, offered = rig.scheduler.psd_client, []
            original = client.open

            def note(rid: str, *args) -> bool:
                offered.append(rid)
                return original(rid, *args)

            client.open = note
            rids = [rig.submit(ids, LENGTH, rid=rid) for ids, rid in zip(PROMPTS, ("\ud800", "fine"))]
            rig.run_until_done()
            rig.idle_check()
            return [rig.output(rid) for rid in rids], offered

    outputs, offered = run_case(case)
    assert_prefixes(outputs, [LENGTH] * 2, oracle.greedy(PROMPTS[:2]))
    assert sorted(offered) == ["fine", "\ud800"]
    assert outputs[0].accepted == 0 < outputs[1].accepted


def test_two_live_requests_of_one_name(run_case, models, oracle) -> None:
    """SGLang's front end refuses them; should they get through, both get their text and the drafter leaks nothing."""

    def case() -> list[list[int]]:
        with Rig(models, loop="overlapped") as rig:
            reqs = []
            for ids in PROMPTS[:6]:
                rig.submit(ids, LENGTH, rid="same")
                reqs.append(rig.scheduler.waiting_queue[-1])
            while not all(req.finished() for req in reqs):
                rig.turn()
            rig.run_until_done()
            rig.idle_check(late_allowed=True)
            return [list(req.output_ids) for req in reqs]

    assert run_case(case) == [ids[:LENGTH] for ids in oracle.greedy(PROMPTS[:6])]
