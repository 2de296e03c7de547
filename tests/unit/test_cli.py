"""``sglang-psd demo`` and ``bench`` refuse what cannot work before they start a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_psd.cli import main
from sglang_psd.resources import NUM_PROMPTS, PROMPTS, load_prompts

RESULT = str(Path(__file__).parents[2] / "docs" / "results" / "cpu_bench.json")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["demo", "--num-steps", "0"], "--num-steps must lie between 1 and 32, got 0"),
        (["demo", "--num-steps", "33"], "--num-steps must lie between 1 and 32, got 33"),
        (["demo", "--requests", "0"], "--requests must lie between 1 and 64, got 0"),
        (["demo", "--requests", "65"], "--requests must lie between 1 and 64, got 65"),
        (["demo", "--max-tokens", "-1"], "--max-tokens must be at least 1, got -1"),
        (["demo", "--target", "/nonexistent"], "--target '/nonexistent' is no folder"),
        (["demo", "--draft", "."], "--draft '.' is no folder"),
        (["demo", "--head", "~/nonexistent"], "--head '~/nonexistent' is no folder"),
        (["bench", "--target", ""], "--target '' is no folder"),
        (["bench", "--draft", "./nonexistent"], "--draft './nonexistent' is no folder"),
        (["bench", "--dataset", "/nonexistent"], "--dataset knows random-ids, prompts, and '/nonexistent' is no file"),
        (["bench", "--timeline", "x", "--trace-file", "/nonexistent"], "--trace-file /nonexistent is no file"),
        (["bench", "--timeline", "x", "--trace-file", __file__], f"--trace-file {__file__} holds no step trace"),
        (["bench", "--report", "/dev/null/x", "--results", RESULT], "/dev/null cannot be used (File exists)"),
        (["bench", "--logs", "/dev/null/x"], "/dev/null/x cannot be used (Not a directory)"),
        (["demo", "--out", "/dev/null/x"], "/dev/null/x cannot be used (Not a directory)"),
    ],
)
def test_what_cannot_work_gets_one_sentence(given: list[str], sentence: str, capsys: pytest.CaptureFixture) -> None:
    assert main(given) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"sglang-psd {given[0]}: {sentence}") and printed.err.count("\n") == 1
    assert printed.out == ""


def test_there_are_as_many_prompts_as_the_limit_says() -> None:
    assert len(load_prompts(10**6)) == NUM_PROMPTS == len(PROMPTS.read_text(encoding="utf-8").splitlines())
