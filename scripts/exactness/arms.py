"""Engines in processes of their own, seen from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.exactness.worker import ANSWERS, READY, Job
from tests.e2e.flags import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
PRINT_EVERY_S = 5.0


@dataclass
class Arm:
    """One engine's process and what it has answered.

    Attributes
    ----------
    label : str
        For people.
    folder : Path
        For its files.
    job : Job
    environment : dict
        Further variables.
    answers : dict of str to dict
        By case (empty for random traffic) and number.
    figures : dict
        What it says at its end.
    error : str or None
    """

    label: str
    folder: Path
    job: Job
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen | None = None
    answers: dict[str, dict[int, list[dict[str, Any]]]] = field(default_factory=lambda: defaultdict(dict))
    figures: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    _read: int = 0

    def start(self) -> None:
        """Start the process; its output goes to a file."""
        self.folder.mkdir(parents=True)
        path = self.folder / "job.json"
        path.write_text(json.dumps(asdict(self.job)))
        with open(self.folder / "log", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scripts.exactness.worker", str(path)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**ENVIRONMENT, **self.environment},
                cwd=ROOT,
            )

    @property
    def ready_file(self) -> Path:
        """Made when the engine is up; holds the seconds that took."""
        return self.folder / READY

    def ready(self) -> bool:
        """Whether the engine is up, or never will be."""
        self.poll()
        return self.ready_file.exists() or self.error is not None

    def over(self) -> bool:
        """Whether nothing more will come."""
        self.poll()
        return bool(self.figures) or self.error is not None

    def poll(self) -> None:
        """Read what has been answered since."""
        ended = self.process is not None and self.process.poll() is not None
        if (self.folder / ANSWERS).exists():
            with open(self.folder / ANSWERS) as file:
                file.seek(self._read)
                while (line := file.readline()).endswith("\n"):
                    self._read = file.tell()
                    self._take(json.loads(line))
        if ended and not self.figures and self.error is None:
            self.error = "ended early: " + (self.folder / "log").read_text(errors="replace")[-3000:]

    def _take(self, entry: dict[str, Any]) -> None:
        if "number" in entry:
            self.answers[entry.get("case", "")][entry["number"]] = entry["answers"]
        elif "done" in entry:
            self.figures = entry["done"]
        else:
            log = (self.folder / "log").read_text(errors="replace")[-3000:]
            self.error = entry["failed"] + "\n" + log

    def stop(self) -> None:
        """End the process if it still runs."""
        if self.process is not None and not self.over():
            self.process.terminate()
            self.error = "did not end in time"

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        path = self.ready_file
        sent = [answers for case in self.answers.values() for answers in case.values()]
        answered = [one for answers in sent for one in answers if "ids" in one]
        rounds = sum(one["rounds"] or 0 for one in answered)
        return {
            "engine": {name: value for name, value in self.job.keywords.items() if not str(value).startswith("/")},
            "start_s": float(path.read_text() or 0) if path.exists() else None,
            "answered": len(sent),
            "tokens": sum(len(one["ids"]) for one in answered),
            "accept_length": round(sum(len(one["ids"]) for one in answered if one["rounds"]) / rounds, 3)
            if rounds
            else None,
            **self.figures,
            **({"error": self.error} if self.error else {}),
        }


def say_go(path: Path, deadline: float) -> None:
    """Let the engines begin; they send no request after ``deadline``."""
    written = path.with_name("soon")  # nobody must read half of it
    written.write_text(str(deadline))
    written.rename(path)


def wait_for_arms(
    arms: Sequence[Arm], reached: Callable[[Arm], bool], until: float, what: str, seen: Callable[[], None]
) -> None:
    """Wait until ``reached`` for all, or ``time.time()`` is ``until``; print, and call ``seen``, now and then."""
    begin, printed = time.time(), 0.0
    while (left := [arm for arm in arms if not reached(arm)]) and time.time() < until:
        time.sleep(0.2)
        if time.time() - printed > PRINT_EVERY_S:
            printed = time.time()
            seen()
            done = ", ".join(f"{arm.label} {sum(map(len, arm.answers.values()))}" for arm in arms)
            print(f"{printed - begin:6.0f} s: {len(arms) - len(left)} of {len(arms)} {what}; {done}", flush=True)
