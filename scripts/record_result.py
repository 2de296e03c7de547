"""Run a command, show its output, and save what it showed as one JSON file under docs/results.

    python scripts/record_result.py docs/results/gpu_demo.json -- sglang-psd demo
    python scripts/record_result.py docs/results/gpu_e2e.json -- python -m pytest tests/e2e

The file holds the command, the date, the machine, the exit status, and the last line of output: as an object where it
is one (the demo's), else as text (pytest's summary). Nothing is typed by hand, and a failed run is recorded as one:
the exit status is passed on.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

__all__ = ["last_result", "provenance", "record", "write_result"]


def machine() -> str:
    """The hardware in words: GPUs by name, else the number of cores."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        names = []
    gpus = [name.strip() for name in names if name.strip()]
    cores = f"{len(os.sched_getaffinity(0))} cores"
    return f"{cores}, {len(gpus)} x {gpus[0]}" if gpus else f"{cores}, no GPU"


def portable(argument: str) -> str:
    """An argument without this machine's folders: absolute paths begin at the project, or are names."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    if argument == sys.executable:  # it may lie in the project's own environment
        return path.name
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def provenance(command: list[str] | None = None) -> dict[str, str]:
    """What every result begins with: the command (by default the script that runs), the day, and the machine."""
    return {
        "command": shlex.join(portable(argument) for argument in command or ["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine(),
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result file as all of them are written."""
    path.write_text(json.dumps(result, indent=1) + "\n")


def last_result(lines: list[str]) -> dict[str, Any]:
    """What a command's output ends with: the object on its last line that is not blank, else that line as text."""
    said = [line.strip() for line in lines if line.strip()]
    last = said[-1] if said else ""
    try:
        found = json.loads(last)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"last_line": last}


def record(path: Path, command: list[str]) -> int:
    """Run ``command``, write ``path``, return the command's exit status."""
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line)
    write_result(path, {**provenance(command), "exit_status": process.returncode, **last_result(lines)})
    return process.returncode


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[2] != "--":
        sys.exit("usage: python scripts/record_result.py FILE.json -- COMMAND ...")
    sys.exit(record(Path(sys.argv[1]), sys.argv[3:]))
