"""docs/reliability.md says what the files in docs/results say."""

from __future__ import annotations

from scripts import reliability_tables


def test_the_page_is_what_the_results_say(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["reliability_tables.py", "--check"])
    assert reliability_tables.main() == 0, capsys.readouterr().out
