"""When drafts count as worthless."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_psd.scheduler.acceptance_watch import LEAST_REQUESTS, WINDOW_DRAFTS, AcceptanceWatch, Verdict
from sglang_psd.scheduler.recovery import is_foreseeable

CROWD = [f"r{i}" for i in range(LEAST_REQUESTS)]


def windows(watch: AcceptanceWatch, *rates: float) -> list[Verdict]:
    """One full window per rate, in rounds of 32 drafts; the verdict at each end."""
    verdicts = []
    for rate in rates:
        found = [watch.add(CROWD, 32, round(32 * rate)) for _ in range(WINDOW_DRAFTS // 32)]
        assert all(verdict is Verdict.FINE for verdict in found[:-1])
        verdicts.append(found[-1])
    return verdicts


def test_first_reopen_then_off() -> None:
    assert windows(AcceptanceWatch(0.1), 0.5, 0.6, 0.0, 0.0) == [Verdict.FINE] * 2 + [Verdict.REOPEN, Verdict.OFF]


def test_a_window_that_recovers_starts_over() -> None:
    verdicts = windows(AcceptanceWatch(0.1), 0.5, 0.0, 0.5, 0.0, 0.5)
    assert verdicts == [Verdict.FINE, Verdict.REOPEN, Verdict.FINE, Verdict.REOPEN, Verdict.FINE]


def test_harder_texts_are_no_collapse() -> None:
    assert set(windows(AcceptanceWatch(0.1), 0.9, *[0.2] * 20, 0.9, 0.125)) == {Verdict.FINE}


def test_a_poor_draft_was_never_better() -> None:
    assert set(windows(AcceptanceWatch(0.1), 0.03, 0.0, 0.0, 0.0)) == {Verdict.FINE}


def test_rounds_without_drafts_say_nothing() -> None:
    watch = AcceptanceWatch(0.5)
    windows(watch, 0.5)
    assert all(watch.add((), 0, 0) is Verdict.FINE for _ in range(10_000))


def test_zero_switches_it_off() -> None:
    assert set(windows(AcceptanceWatch(0.0), 0.9, 0.0, 0.0, 0.0)) == {Verdict.FINE}


def test_one_request_ends_nothing_for_all() -> None:
    """However long it is, and however little a drafter foresees of it."""
    watch = AcceptanceWatch(0.1)
    windows(watch, 0.7)
    assert all(watch.add(["odd"], 3, 0) is Verdict.FINE for _ in range(WINDOW_DRAFTS))
    assert watch.add(CROWD, 3, 0) is Verdict.REOPEN, "with others it counts"


PLAIN = {
    "temperature": 1.0,
    "logit_bias": None,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


@pytest.mark.parametrize(
    ("params", "fields", "foreseeable"),
    [
        ({}, {}, True),
        ({"temperature": 0.2}, {}, True),
        ({"temperature": 100.0}, {}, False),
        ({"logit_bias": {"5": 50.0}}, {}, False),
        ({"frequency_penalty": 2.0}, {}, False),
        ({"presence_penalty": -2.0}, {}, False),
        ({"repetition_penalty": 1.5}, {}, False),
        ({}, {"grammar": object()}, False),
        ({}, {"custom_logit_processor": "{}"}, False),
    ],
)
def test_only_what_a_drafter_can_foresee_is_judged(params: dict, fields: dict, foreseeable: bool) -> None:
    sampling = SimpleNamespace(**{**PLAIN, **params})
    req = SimpleNamespace(**{"grammar": None, "custom_logit_processor": None, **fields}, sampling_params=sampling)
    assert is_foreseeable(req) is foreseeable  # type: ignore[arg-type]
