"""The two commands that start a server, asked for help and given flags that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_psd.config import FLAG_FIELDS, flag_name
from tests.command import run_command

COMMANDS = ("sglang serve", "sglang.launch_server")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_the_flags(run_case, models: Path, command: str) -> None:
    ended = run_case(run_command, command, ["--model-path", str(models / "T"), "--help"])
    missing = [flag for flag in map(flag_name, FLAG_FIELDS) if flag not in ended.out]
    assert ended.code == 0 and not missing and "--psd-config" in ended.out


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--psd-drafter-mem-fraction", "1.5"], "--psd-drafter-mem-fraction must lie between 0 and 1, got 1.5"),
        (["--psd-mode", "paralel"], "--psd-mode: invalid choice: 'paralel'"),
        (["--psd-config", "{mode: parallel}"], "--psd-config holds malformed JSON"),
        (["--speculative-num-steps", "99"], "--speculative-num-steps must lie between 1 and 32, got 99"),
        (["--dp-size", "2"], "PSD does not work with --dp-size above 1 yet"),
    ],
)
def test_a_bad_flag_ends_the_command_with_a_sentence(
    run_case, models: Path, command: str, flags: list[str], sentence: str
) -> None:
    """One line says what is wrong; nothing is loaded, and there is no traceback."""
    pair = ["--model-path", str(models / "T"), "--speculative-draft-model-path", str(models / "D_mid")]
    ended = run_case(run_command, command, [*pair, "--speculative-algorithm", "PSD", *flags])
    said = [line for line in ended.err.splitlines() if sentence in line]
    assert ended.code == 2 and len(said) == 1 and "error: " in said[0] and "Traceback" not in ended.err, ended
