"""When drafts count as worthless."""

from __future__ import annotations

from sglang_psd.scheduler.acceptance_watch import WINDOW_DRAFTS, AcceptanceWatch, Verdict


def windows(watch: AcceptanceWatch, *rates: float) -> list[Verdict]:
    """One full window per rate, in rounds of 32 drafts; the verdict at each end."""
    verdicts = []
    for rate in rates:
        found = [watch.add(32, round(32 * rate)) for _ in range(WINDOW_DRAFTS // 32)]
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
    assert all(watch.add(0, 0) is Verdict.FINE for _ in range(10_000))


def test_zero_switches_it_off() -> None:
    assert set(windows(AcceptanceWatch(0.0), 0.9, 0.0, 0.0, 0.0)) == {Verdict.FINE}
