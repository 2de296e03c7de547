"""How long a round waits for the drafter, and when the drafter is given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_psd.scheduler import vitals as v
from sglang_psd.scheduler.vitals import Vitals


class Patient:
    """Vitals whose clock and pulse the test moves."""

    def __init__(self, timeout_s: float | None = None, hung_after_s: float = 20.0, warm_up_s: float = 600.0):
        self.now, self.silence = 100.0, 0.0
        self.vitals = Vitals(timeout_s, hung_after_s, warm_up_s, lambda: self.silence, lambda: self.now)

    def answer(self, seconds: float, count: int = 1) -> None:
        for _ in range(count):
            self.vitals.answered(seconds, useful=True)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [([], 10.0), ([0.01] * 15, 10.0), ([0.01] * 16, 1.0), ([0.1] * 40, 2.0), ([3.0] * 40, 10.0)],
)
def test_the_deadline_follows_the_usual_answer(answers: list[float], expected: float) -> None:
    patient = Patient()
    for seconds in answers:
        patient.answer(seconds)
    assert patient.vitals.timeout_s == pytest.approx(expected)


@given(st.lists(st.floats(0, 1e6), max_size=200))
def test_the_deadline_has_bounds(answers: list[float]) -> None:
    patient = Patient()
    for seconds in answers:
        patient.answer(seconds)
    assert v.SHORTEST_WAIT_S <= patient.vitals.timeout_s <= v.LONGEST_WAIT_S


def test_a_configured_timeout_is_kept() -> None:
    patient = Patient(timeout_s=0.25)
    patient.answer(7.0, 40)
    assert patient.vitals.timeout_s == 0.25


def test_one_wait_in_vain_then_none_until_an_answer_of_use() -> None:
    vitals = Patient().vitals
    assert vitals.patience_s > 0
    assert vitals.waited_in_vain() and not vitals.waited_in_vain()
    assert vitals.late and vitals.patience_s == 0
    vitals.answered(0.1, useful=False)
    assert vitals.late
    vitals.answered(0.1, useful=True)
    assert not vitals.late and vitals.patience_s > 0


def test_nothing_is_awaited_from_a_silent_process() -> None:
    patient = Patient()
    patient.silence = v.SILENT_AFTER_S + 0.1
    assert patient.vitals.silent and patient.vitals.patience_s == 0
    patient.silence = 0.0
    assert patient.vitals.patience_s > 0


def test_a_late_drafter_without_work_is_found_well_again() -> None:
    """All its requests ended meanwhile, so no answer of use will come: the pong ends the lateness."""
    patient = Patient()
    vitals = patient.vitals
    before = vitals.pinged()
    vitals.waited_in_vain()
    vitals.ponged(before)
    assert vitals.late, "that ping was sent before the drafter was late"
    assert vitals.ping_due(), "no need to wait for the next one"
    vitals.ponged(vitals.pinged())
    assert not vitals.late


def test_pings_come_at_their_time() -> None:
    patient = Patient()
    assert not patient.vitals.ping_due()
    patient.now += v.PING_EVERY_S
    assert patient.vitals.ping_due()
    patient.vitals.pinged()
    assert not patient.vitals.ping_due()


def test_a_ping_that_got_lost_is_no_verdict() -> None:
    """The next one is answered: the drafter gets through its messages."""
    patient = Patient(hung_after_s=5.0)
    patient.answer(0.01)
    for _ in range(20):
        patient.vitals.pinged()
        patient.now += v.PING_EVERY_S
        assert patient.vitals.ping_due()
        patient.vitals.ponged(patient.vitals.pinged())
        assert patient.vitals.verdict() is None


def test_an_unanswered_ping_is_the_end() -> None:
    patient = Patient(hung_after_s=5.0)
    patient.answer(0.01)
    number = patient.vitals.pinged()
    patient.now += 4.9
    assert patient.vitals.verdict() is None
    patient.now += 0.2
    assert "not answered for 5 s" in (patient.vitals.verdict() or "")
    patient.vitals.ponged(number)
    assert patient.vitals.verdict() is None


def test_the_first_answer_may_take_a_compilation() -> None:
    patient = Patient(hung_after_s=5.0, warm_up_s=60.0)
    patient.vitals.pinged()
    patient.now += 50.0
    assert patient.vitals.verdict() is None
    patient.silence = 40.0
    assert patient.vitals.verdict() is not None, "a stopped process compiles nothing"
    patient.silence = 0.0
    patient.now += 11.0
    assert patient.vitals.verdict() is not None
