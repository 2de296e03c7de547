"""Random traffic on engines with and without PSD, side by side, on one or two GPUs.

    python scripts/gpu_exactness.py --requests 20000 --time-budget 240 --out docs/results/gpu_exactness.json
    python scripts/gpu_exactness.py --device cpu --requests 300

For each setting three engines with the embedded models get the same requests: plain SGLang, PSD in parallel mode (small
KV pool, chunked prompts), PSD in sequential mode (pages of 16). Greedy answers have to be the plain engine's: ids,
text, finish reason, usage, log probabilities. Seeded answers have to be the same in both PSD engines, because plain
SGLang has no such seeds. Groups of equal requests without a seed have to follow the plain engine's law; float32 needs
SGLang's deterministic mode, where there is no request without a seed, so laws are compared in float16.

In float32 equal means equal up to the order of additions. In bfloat16 the two best tokens are often as good as equal,
and kernels for other shapes decide otherwise. So every difference is printed with its gap: by how much the reference
preferred its own token, in nats. A gap above the setting's bound (over the temperature, where a seed decides) is a
failure, and so is everything that no rounding explains; each is written with its request. So is an engine none of
whose answers could be compared. A request that either side aborts is compared as far as both came.

The time budget counts from the start of the command. Every engine answers, in the same order, what it can until then;
``compared`` says how many requests of each kind that left to compare. Without a GPU the engines run one after the
other, and a third of the budget counts for each from its start.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.exactness.arms import Arm, say_go, wait_for_arms
from scripts.exactness.compare import Verdict, compare
from scripts.exactness.law import same_law
from scripts.exactness.settings import ARMS, PLAIN, SETTINGS, Setting, engine_keywords, number_of_gpus
from scripts.exactness.traffic import random_requests
from scripts.exactness.worker import Job, Traffic
from scripts.record_result import provenance

START_TIMEOUT_S = 400.0
# Share of the time budget after which engines that are not up are not waited for.
START_SHARE = 0.6
FINISH_S = 10.0  # for the requests that are under way at the deadline
SMALLEST_P = 1e-4
CONCURRENCY = {"cuda": 192, "cpu": 24}


class Group:
    """The engines of one setting and what is known about their answers.

    Parameters
    ----------
    given : Namespace
        The command line.
    setting : Setting
    folder : Path
        For files of the engines.
    """

    def __init__(self, given: argparse.Namespace, setting: Setting, folder: Path):
        self.setting = setting
        self._requests = random_requests(given.seed, given.requests, setting.law_every)
        self._verdicts = {name: Verdict() for name in ARMS[1:]}
        self._seen = {name: set[int]() for name in ARMS[1:]}
        # Which engine's answers are right, by kind; "law" is judged as a whole. SGLang's default seed makes every
        # sampled request of a deterministic engine a seeded one.
        self._reference = {"greedy": PLAIN, "seeded": "sequential"}
        if setting.deterministic:
            self._reference["sampled"] = "sequential"
        keywords = {name: engine_keywords(setting, name, given.device, number_of_gpus(given.device)) for name in ARMS}
        self.arms = {
            name: Arm(
                f"{setting.name} {name}",
                folder / f"{setting.name}-{name}",
                Job(
                    keywords={**keywords[name], **json.loads(given.engine)},
                    go=str(folder / "go"),
                    concurrency=given.concurrency or CONCURRENCY[given.device],
                    reference=tuple(kind for kind, arm in self._reference.items() if arm == name),
                    traffic=Traffic(given.seed, given.requests, setting.law_every, plain=name == PLAIN),
                ),
                setting.environment,
            )
            for name in ARMS
        }

    def judge(self) -> None:
        """Compare what both sides have answered and nobody has compared yet; print differences."""
        for name, verdict in self._verdicts.items():
            arm = self.arms[name]
            for number in sorted(arm.answers[""].keys() - self._seen[name]):
                request = self._requests[number]
                reference = self._reference.get(request.kind)
                right = None
                if reference not in (None, name):
                    right = self.arms[reference].answers[""].get(number)
                    if right is None:
                        continue
                self._seen[name].add(number)
                compare(request, arm.answers[""][number], right, self.setting.bound, verdict)
                for said in verdict.news():
                    print(f"{arm.label}: {said}", flush=True)

    def law(self) -> dict[str, Any]:
        """The law tests of both PSD engines against the plain one; empty where no request is for a law."""
        if not self.setting.law_every:
            return {}
        texts: dict[str, dict[str, list[list[int]]]] = {}
        for name, arm in self.arms.items():
            groups: dict[str, list[list[int]]] = {}
            for number, answers in arm.answers[""].items():
                kind = self._requests[number].kind
                if kind.startswith("law") and "ids" in answers[0]:
                    groups.setdefault(kind, []).append(answers[0]["ids"])
            texts[name] = groups
        return {name: same_law(texts[name], texts[PLAIN]) for name in self._verdicts}

    def result(self) -> dict[str, Any]:
        """For JSON; ``failures`` counts everything that is wrong."""
        law = self.law()
        failures = sum(arm.error is not None for arm in self.arms.values())
        idle = 0 if self.setting.law_every == 1 else sum(not v.compared for v in self._verdicts.values())
        failures += idle + sum(len(v.failures) + len(v.wide) for v in self._verdicts.values())
        failures += sum(one["p_value"] is not None and one["p_value"] < SMALLEST_P for one in law.values())
        return {
            "failures": failures,
            "bound": self.setting.bound,
            "environment": self.setting.environment,
            "compared": {name: verdict.figures() for name, verdict in self._verdicts.items()},
            "law": law,
            "engines": {name: arm.summary() for name, arm in self.arms.items()},
        }


class Run:
    """All engines of all settings."""

    def __init__(self, given: argparse.Namespace, folder: Path):
        self._given, self._begin, self._folder = given, time.time(), folder
        known = SETTINGS[given.device]
        self._groups = [Group(given, known[name], folder) for name in given.settings.split(",") if name in known]

    def __call__(self) -> None:
        """Start, wait, compare."""
        arms = [arm for group in self._groups for arm in group.arms.values()]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines end, too
        try:
            if self._given.device == "cuda":
                self._run_together(arms, self._begin + self._given.time_budget)
            else:
                for arm in arms:  # memory is short there
                    self._run_together([arm], None)
        finally:
            for arm in arms:
                arm.stop()
        self.seen()

    def _run_together(self, arms: list[Arm], until: float | None) -> None:
        (self._folder / "go").unlink(missing_ok=True)
        for arm in arms:
            arm.start()
        start_s = START_TIMEOUT_S if until is None else START_SHARE * self._given.time_budget
        wait_for_arms(arms, Arm.ready, time.time() + start_s, "engines are up", self.seen)
        if until is None:
            until = time.time() + self._given.time_budget / len(ARMS)
        say_go(self._folder / "go", until - FINISH_S)
        wait_for_arms(arms, Arm.over, max(until, time.time()) + FINISH_S, "engines are done", self.seen)

    def seen(self) -> None:
        """Judge and save what there is."""
        for group in self._groups:
            group.judge()
        if self._given.out is not None:
            self._given.out.write_text(json.dumps(self.result(), indent=1) + "\n")

    def result(self) -> dict[str, Any]:
        """For JSON."""
        import torch

        settings = {group.setting.name: group.result() for group in self._groups}
        return {
            **provenance(),
            "torch": torch.__version__,
            "seconds": round(time.time() - self._begin, 1),
            "failures": sum(setting["failures"] for setting in settings.values()),
            "settings": settings,
        }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="requests for each engine (default 20000)")
    parser.add_argument("--time-budget", type=float, default=300, help="seconds for all, start included (default 300)")
    everything = ",".join(SETTINGS["cuda"])
    parser.add_argument("--settings", default=everything, help=f"of {everything} (default all)")
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
    result = run.result()
    for name, setting in result["settings"].items():
        for arm, found in setting["compared"].items():
            said = {key: value for key, value in found.items() if not key.startswith(("first_", "gaps_"))}
            print(f"{name} {arm}: {json.dumps(said)}; law: {json.dumps(setting['law'].get(arm))}")
        for arm, engine in setting["engines"].items():
            said = {key: engine.get(key) for key in ("start_s", "seconds", "answered", "tokens", "accept_length")}
            print(f"{name} {arm}: {json.dumps(said)} {engine.get('error', '')[-1500:]}")
    print(f"{result['failures']} failures in {result['seconds']} s; logs and answers: {folder}")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
