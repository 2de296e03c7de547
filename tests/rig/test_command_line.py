"""The two commands that start a server, asked for help and given flags that cannot work.

Each runs as a fork of the test process, from its entry point on, with descriptors of its own.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_psd.config import FLAG_FIELDS, flag_name

COMMANDS = ("serve", "launch_server")


@dataclass
class Ended:
    """A command that has ended."""

    code: object
    out: str
    err: str


def _run(command: str, flags: list[str]) -> None:
    """What the console script ``sglang serve``, or ``python -m sglang.launch_server``, does."""
    if command == "serve":
        from sglang.cli.main import main

        sys.argv = ["sglang", "serve", *flags]
        main()
    else:
        sys.argv = ["launch_server.py", *flags]
        runpy.run_module("sglang.launch_server", run_name="__main__")


def run_command(command: str, flags: list[str]) -> Ended:
    """Run a command to its end and keep what it prints."""
    code: object = 0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        try:
            _run(command, flags)
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        sys.stderr.flush()
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read(), err.read())


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
