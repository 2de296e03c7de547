"""Random traffic on engines with and without PSD, side by side, on one or two GPUs.

    python scripts/gpu_exactness.py --requests 20000 --time-budget 240 --out docs/results/gpu_exactness.json
    python scripts/gpu_exactness.py --device cpu --requests 300

For each setting three engines with the embedded models get the same requests: plain SGLang, PSD in parallel mode (small
KV pool, chunked prompts), PSD in sequential mode (pages of 16). Greedy answers have to be the plain engine's: ids,
text, finish reason, usage, log probabilities. Seeded answers have to be the same in both PSD engines, because plain
SGLang has no such seeds. Groups of equal requests without a seed have to follow the plain engine's law.

In float32 equal means equal up to the order of additions. In bfloat16 the two best tokens are often as good as equal,
and kernels for other shapes decide otherwise. So every difference is printed with its gap: by how much the reference
preferred its own token, in nats. A gap above the setting's bound is a failure, and so is everything that no rounding
explains; each is written with its request. The time budget counts from the start of the command.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.exactness.compare import Verdict, compare, same_law
from scripts.exactness.settings import ARMS, PLAIN, SETTINGS, Setting, engine_keywords
from scripts.exactness.traffic import Request, random_requests
from scripts.exactness.worker import Job, write_job
from scripts.record_result import machine
from tests.e2e.flags import ENVIRONMENT

START_TIMEOUT_S = 400.0
FINISH_S = 60.0  # for the requests that are under way at the deadline
PRINT_EVERY_S = 5.0
SMALLEST_P = 1e-4
ROOT = Path(__file__).resolve().parents[1]
# Which engine's answers are right, by kind; "law" is judged as a whole.
REFERENCE = {"greedy": PLAIN, "seeded": "sequential"}


@dataclass
class Arm:
    """One engine's process and what it has answered."""

    setting: Setting
    name: str
    folder: Path
    job: Job
    process: subprocess.Popen | None = None
    answers: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    _read: int = 0

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.setting.name} {self.name}"

    def start(self, deadline: float) -> None:
        """Start the process; its output goes to a file. It sends no request after ``deadline`` (``time.time()``)."""
        path = self.folder / "job.json"
        write_job(path, replace(self.job, deadline=deadline))
        with open(self.folder / "log", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scripts.exactness.worker", str(path)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**ENVIRONMENT, **self.setting.environment},
                cwd=ROOT,
            )

    def ready(self) -> bool:
        """Whether the engine is up, or never will be."""
        self.poll()
        return os.path.exists(self.job.ready) or self.error is not None

    def over(self) -> bool:
        """Whether nothing more will come."""
        self.poll()
        return bool(self.figures) or self.error is not None

    def poll(self) -> None:
        """Read what has been answered since."""
        ended = self.process is not None and self.process.poll() is not None
        if os.path.exists(self.job.answers):
            with open(self.job.answers) as file:
                file.seek(self._read)
                while (line := file.readline()).endswith("\n"):
                    self._read = file.tell()
                    self._take(json.loads(line))
        if ended and not self.figures and self.error is None:
            self.error = "ended early: " + (self.folder / "log").read_text(errors="replace")[-3000:]

    def _take(self, entry: dict[str, Any]) -> None:
        if "number" in entry:
            self.answers[entry["number"]] = entry["answers"]
        elif "done" in entry:
            self.figures = entry["done"]
        else:
            log = (self.folder / "log").read_text(errors="replace")[-3000:]
            self.error = entry["failed"] + "\n" + log

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        path = Path(self.job.ready)
        answered = [one for answers in self.answers.values() for one in answers if "ids" in one]
        rounds = sum(one["rounds"] or 0 for one in answered)
        return {
            "engine": {name: value for name, value in self.job.keywords.items() if not str(value).startswith("/")},
            "start_s": float(path.read_text() or 0) if path.exists() else None,
            "answered": len(self.answers),
            "tokens": sum(len(one["ids"]) for one in answered),
            "accept_length": round(sum(len(one["ids"]) for one in answered if one["rounds"]) / rounds, 3)
            if rounds
            else None,
            **self.figures,
            **({"error": self.error} if self.error else {}),
        }


def make_arms(given: argparse.Namespace, setting: Setting, folder: Path, num_gpus: int) -> list[Arm]:
    """The three engines of a setting."""
    arms = []
    for name in ARMS:
        place = folder / f"{setting.name}-{name}"
        place.mkdir(parents=True)
        job = Job(
            keywords={**engine_keywords(setting, name, given.device, num_gpus), **json.loads(given.engine)},
            answers=str(place / "answers.jsonl"),
            ready=str(place / "ready"),
            go=str(folder / "go"),
            seed=given.seed,
            count=given.requests,
            deterministic=setting.deterministic,
            concurrency=given.concurrency or (192 if given.device == "cuda" else 24),
            deadline=0.0,
            aborts=name != PLAIN,
            reference=tuple(kind for kind, arm in REFERENCE.items() if arm == name)
            + (("sampled",) if setting.deterministic and name == "sequential" else ()),
        )
        arms.append(Arm(setting, name, place, job))
    return arms


def judge(arms: list[Arm], requests: list[Request], seen: dict[str, set[int]], verdicts: dict[str, Verdict]) -> None:
    """Compare what both sides have answered and nobody has compared yet; print differences."""
    by_name = {arm.name: arm for arm in arms}
    setting = arms[0].setting
    for arm in arms[1:]:
        verdict, done = verdicts[arm.name], seen[arm.name]
        for number in sorted(arm.answers.keys() - done):
            request = requests[number]
            reference = REFERENCE.get(request.kind)
            if setting.deterministic and request.kind == "sampled":
                reference = "sequential"  # the default seed makes it a seeded one
            if reference == arm.name:
                reference = None
            right = None if reference is None else by_name[reference].answers.get(number)
            if reference is not None and right is None:
                continue
            done.add(number)
            known = len(verdict.differences), len(verdict.failures)
            compare(request, arm.answers[number], right, setting.bound, verdict)
            for found in verdict.differences[known[0] :]:
                more = "" if found.listed else " or more"
                wide = "" if found.gap <= setting.bound else f"  ABOVE {setting.bound}: {request}"
                print(
                    f"{arm.label}: request {number} ({found.kind}) differs at token {found.position}: {found.ours}, "
                    f"not {found.right}; gap {found.gap:.6f}{more}{wide}",
                    flush=True,
                )
            for said in verdict.failures[known[1] :]:
                print(f"{arm.label}: FAILURE {said[:3000]}", flush=True)


def law_of(arms: list[Arm], requests: list[Request]) -> dict[str, Any]:
    """The law tests of both PSD engines against the plain one."""
    texts: list[dict[str, list[list[int]]]] = []
    for arm in arms:
        groups: dict[str, list[list[int]]] = {}
        for number, answers in arm.answers.items():
            kind = requests[number].kind
            if kind.startswith("law") and "ids" in answers[0]:
                groups.setdefault(kind, []).append(answers[0]["ids"])
        texts.append(groups)
    return {arm.name: same_law(found, texts[0]) for arm, found in zip(arms[1:], texts[1:])}


class Run:
    """All engines of all settings; ``result`` is what is written."""

    def __init__(self, given: argparse.Namespace, folder: Path):
        import torch

        self._given = given
        self._begin = time.time()
        num_gpus = torch.cuda.device_count() if given.device == "cuda" else 0
        names = given.settings.split(",")
        self._groups = [
            make_arms(given, SETTINGS[given.device][name], folder, num_gpus)
            for name in names
            if name in SETTINGS[given.device]
        ]
        self._go = folder / "go"
        self._requests = [random_requests(given.seed, given.requests, g[0].setting.deterministic) for g in self._groups]
        self._seen = [{name: set[int]() for name in ARMS} for _ in self._groups]
        self._verdicts = [{name: Verdict() for name in ARMS[1:]} for _ in self._groups]

    def __call__(self) -> dict[str, Any]:
        """Start, wait, compare; returns the result."""
        arms = [arm for group in self._groups for arm in group]
        # Memory of a machine without GPUs is short: one engine after the other.
        turns = [arms] if self._given.device == "cuda" else [[arm] for arm in arms]
        for i, turn in enumerate(turns):
            self._go.unlink(missing_ok=True)
            until = self._begin + self._given.time_budget * (i + 1) / len(turns)
            self._run_together(turn, until)
        self._judge()
        return self.result()

    def _run_together(self, arms: list[Arm], until: float) -> None:
        try:
            for arm in arms:
                arm.start(until - FINISH_S / 3)
            self._wait(arms, lambda arm: arm.ready(), time.time() + START_TIMEOUT_S, "engines are up")
            self._go.touch()
            self._wait(arms, lambda arm: arm.over(), max(until, time.time()) + FINISH_S, "engines are done")
        finally:
            for arm in arms:
                if arm.process is not None and not arm.over():
                    arm.process.terminate()
                    arm.error = "did not end in time"

    def _wait(self, arms: list[Arm], reached: Any, until: float, what: str) -> None:
        printed = 0.0
        while (left := [arm for arm in arms if not reached(arm)]) and time.time() < until:
            time.sleep(0.2)
            if time.time() - printed > PRINT_EVERY_S:
                printed = time.time()
                self._judge()
                done = ", ".join(f"{arm.label} {len(arm.answers)}" for arm in arms)
                print(
                    f"{printed - self._begin:6.0f} s: {len(arms) - len(left)} of {len(arms)} {what}; {done}", flush=True
                )
                self.write()

    def _judge(self) -> None:
        for group, requests, seen, verdicts in zip(self._groups, self._requests, self._seen, self._verdicts):
            judge(group, requests, seen, verdicts)

    def write(self) -> None:
        """Save the result so far."""
        if self._given.out is not None:
            self._given.out.write_text(json.dumps(self.result(), indent=1) + "\n")

    def result(self) -> dict[str, Any]:
        """For JSON; ``failures`` counts everything that is wrong."""
        import torch

        settings, failures = {}, 0
        for group, requests, verdicts in zip(self._groups, self._requests, self._verdicts):
            law = law_of(group, requests)
            failures += sum(arm.error is not None for arm in group)
            failures += sum(len(v.failures) + len(v.wide) for v in verdicts.values())
            failures += sum(one["p_value"] is not None and one["p_value"] < SMALLEST_P for one in law.values())
            settings[group[0].setting.name] = {
                "bound": group[0].setting.bound,
                "environment": group[0].setting.environment,
                "engines": {arm.name: arm.summary() for arm in group},
                "compared": {name: verdict.figures() for name, verdict in verdicts.items()},
                "law": law,
            }
        return {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "machine": machine(),
            "torch": torch.__version__,
            "seconds": round(time.time() - self._begin, 1),
            "failures": failures,
            "settings": settings,
        }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="requests for each engine (default 20000)")
    parser.add_argument("--time-budget", type=float, default=300, help="seconds for all, start included (default 300)")
    parser.add_argument("--settings", default="float32,bfloat16", help="of float32 and bfloat16 (default both)")
    parser.add_argument("--device", choices=sorted(SETTINGS), default="cuda")
    parser.add_argument("--concurrency", type=int, help="requests sent at once to each engine")
    parser.add_argument("--engine", default="{}", help="JSON with further keywords for every engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="folder for logs and answers (default: a temporary one)")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> int:
    """Run, write JSON; exit status 1 when anything is wrong."""
    given = parse()
    folder = Path(tempfile.mkdtemp(prefix="psd-exactness-")) if given.logs is None else given.logs.resolve()
    run = Run(given, folder)
    run()
    run.write()
    result = run.result()
    for name, setting in result["settings"].items():
        print(name, json.dumps({k: setting[k] for k in ("compared", "law")}, indent=1)[:6000])
    print(f"{result['failures']} failures in {result['seconds']} s; logs and answers: {folder}")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
