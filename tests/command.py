"""Commands that end by themselves, run in a fork of the test process (``run_case``), from their entry point on."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from dataclasses import dataclass


@dataclass
class Ended:
    """A command that has ended."""

    code: object
    out: str
    err: str


def _run(command: str, arguments: list[str]) -> None:
    """What the console script ``sglang serve`` does, or ``python -m`` with the name of a module."""
    if command == "sglang serve":
        from sglang.cli.main import main

        sys.argv = ["sglang", "serve", *arguments]
        main()
    else:
        sys.argv = [f"{command.rpartition('.')[2]}.py", *arguments]
        runpy.run_module(command, run_name="__main__", alter_sys=True)


def run_command(command: str, arguments: list[str]) -> Ended:
    """Run a command to its end, with descriptors of its own, and keep what it prints."""
    code: object = 0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        try:
            _run(command, arguments)
        except SystemExit as end:
            code = end.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read(), err.read())
