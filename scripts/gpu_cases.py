"""The cases that engines with speculation are known to get wrong, on one or two GPUs, in bfloat16.

    python scripts/gpu_cases.py --time-budget 300 --out docs/results/gpu_cases.json
    python scripts/gpu_cases.py --device cpu --servers main --cases R16,R18

One plain engine and one for each way to start PSD (``scripts/exactness/cases.py``), with the embedded models, side by
side. Greedy answers have to be the plain engine's, but for differences whose gap is tiny (see ``gpu_exactness.py``);
each is printed. What else is right about the answers is checked case by case. The time budget counts from the start.
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
from scripts.exactness.cases import CASES, SERVERS, Server
from scripts.exactness.checkpoints import make_checkpoints
from scripts.exactness.compare import Verdict, compare, form_of
from scripts.exactness.settings import PLAIN, SETTINGS, engine_keywords, number_of_gpus
from scripts.exactness.worker import Cases, Job
from scripts.record_result import provenance

START_TIMEOUT_S = 400.0
# Share of the time budget after which engines that are not up are not waited for.
START_SHARE = 0.6
FINISH_S = 30.0
CONCURRENCY = 64
SMALL_POOL = ("max_total_tokens", "chunked_prefill_size", "schedule_conservativeness", "page_size")


def server_keywords(server: Server, checkpoints: dict[str, str], device: str) -> dict[str, Any]:
    """Keywords of a PSD engine."""
    setting = SETTINGS[device]["bfloat16" if device == "cuda" else "float32"]
    plain = engine_keywords(setting, PLAIN, device, number_of_gpus(device))
    keywords = engine_keywords(setting, server.mode, device, number_of_gpus(device))
    keywords = {name: value for name, value in keywords.items() if name not in SMALL_POOL}
    return {
        **keywords,
        "max_total_tokens": plain["max_total_tokens"],
        "model_path": checkpoints[server.target],
        "speculative_draft_model_path": checkpoints[server.draft],
        "speculative_num_steps": server.k,
        **server.more,
    }


def make_arms(given: argparse.Namespace, folder: Path, checkpoints: dict[str, str]) -> dict[str, Arm]:
    """The engines by name, the plain one first."""
    chosen = {
        name: server
        for name, server in SERVERS.items()
        if given.servers in ("", name) or name in given.servers.split(",")
    }
    wanted = {
        name: tuple(case for case in server.cases if not given.cases or case in given.cases.split(","))
        for name, server in chosen.items()
    }
    asked = {case for cases in wanted.values() for case in cases}
    setting = SETTINGS[given.device]["bfloat16" if given.device == "cuda" else "float32"]

    def arm(name: str, keywords: dict[str, Any], names: tuple[str, ...], plain: bool) -> Arm:
        job = Job(
            keywords=keywords,
            go=str(folder / "go"),
            concurrency=CONCURRENCY,
            reference=("greedy",) if plain else (),
            cases=Cases(names, str(folder / "probe.json"), plain, checkpoints),
        )
        return Arm(name, folder / name, job)

    keywords = engine_keywords(setting, PLAIN, given.device, number_of_gpus(given.device))
    arms = {PLAIN: arm(PLAIN, keywords, tuple(case for case in CASES if case in asked), True)}
    for name, server in chosen.items():
        arms[name] = arm(name, server_keywords(server, checkpoints, given.device), wanted[name], False)
    return arms


def judge_case(name: str, server: Server, arm: Arm, plain: Arm, probe: list[list[int]], bound: float) -> dict[str, Any]:
    """One case on one engine: figures, and what is wrong."""
    case, answers, right = CASES[name], arm.answers[name], plain.answers[name]
    requests = case.requests(probe)
    verdict, wrong = Verdict(), []
    if -1 in answers:
        return {"wrong": [answers[-1][0]["error"]]}
    missing = [one.number for one in requests if one.number not in answers]
    if missing:
        wrong.append(f"{len(missing)} of {len(requests)} requests were not answered")
    for one in requests:
        if one.number in answers:
            compared = server.compared and one.kind == "greedy"
            reference = right.get(one.number, [{"error": "not answered"}]) if compared else None
            compare(one, answers[one.number], reference, bound, verdict)
    for said in verdict.news():
        print(f"{arm.label} {name}: {said}", flush=True)
    good = not missing and not any(form_of(one, answer) for one in requests for answer in answers[one.number])
    if case.check is not None and good:
        wrong += case.check(requests, [answers[one.number] for one in requests], server.k)
    wrong += verdict.failures[:10] + [f"gap {found.gap}: {found}" for found in verdict.wide[:10]]
    found = [answer for number in answers for answer in answers[number] if answer.get("rounds")]
    rounds = sum(answer["rounds"] for answer in found)
    return {
        "requests": len(requests),
        "tokens": verdict.tokens,
        "accept_length": round(sum(len(answer["ids"]) for answer in found) / rounds, 3) if rounds else None,
        "first_differences": len(verdict.differences),
        "largest_gap": round(max((found.gap for found in verdict.differences), default=0.0), 6),
        "largest_logprob_difference": round(verdict.largest_value_difference, 6),
        **({"said": answers[-2][0]["said"]} if -2 in answers else {}),
        "wrong": wrong,
    }


def judge(arms: dict[str, Arm], folder: Path, bound: float) -> dict[str, Any]:
    """Every case on every engine."""
    servers: dict[str, Any] = {}
    probe_file = folder / "probe.json"
    probe = json.loads(probe_file.read_text()) if probe_file.exists() else None
    for name, arm in arms.items():
        found: dict[str, Any] = {"start_s": arm.summary()["start_s"], **arm.figures, "cases": {}, "wrong": []}
        server = SERVERS.get(name)
        if server is not None and server.refused is not None:
            if arm.error is None or server.refused not in arm.error:
                found["wrong"].append(f"it should have been refused with {server.refused!r}: {arm.error}")
        elif arm.error is not None:
            found["wrong"].append(arm.error)
        elif server is not None and probe is not None and arm.job.cases is not None:
            for case in arm.job.cases.names:
                found["cases"][case] = judge_case(case, server, arm, arms[PLAIN], probe, bound)
        servers[name] = found
    return servers


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-budget", type=float, default=300, help="seconds for all, start included (default 300)")
    parser.add_argument("--servers", default="", help="some of the servers, separated by commas")
    parser.add_argument("--cases", default="", help="some of the cases")
    parser.add_argument("--device", choices=sorted(SETTINGS), default="cuda")
    parser.add_argument("--logs", type=Path, help="folder for logs and answers (default: a temporary one)")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def run(given: argparse.Namespace, folder: Path, begin: float) -> dict[str, Arm]:
    """Start, wait, stop; without a GPU two engines at a time."""
    arms = make_arms(given, folder, make_checkpoints(folder / "models"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines end, too
    until = begin + given.time_budget
    # Memory of a machine without GPUs is short; the plain engine's probe outlives it.
    turns = [list(arms.values())] if given.device == "cuda" else [[arm] for arm in arms.values()]
    try:
        for turn in turns:
            (folder / "go").unlink(missing_ok=True)
            for arm in turn:
                arm.start()
            start_s = START_SHARE * given.time_budget if given.device == "cuda" else START_TIMEOUT_S
            wait_for_arms(turn, Arm.ready, time.time() + start_s, "engines are up", lambda: None)
            end = until if given.device == "cuda" else time.time() + given.time_budget
            say_go(folder / "go", end - FINISH_S)
            wait_for_arms(turn, Arm.over, max(end, time.time()) + FINISH_S, "engines are done", lambda: None)
    finally:
        for arm in arms.values():
            arm.stop()
    return arms


def main() -> int:
    """Run, judge, write JSON; exit status 1 when anything is wrong."""
    given, begin = parse(), time.time()
    folder = Path(tempfile.mkdtemp(prefix="psd-cases-")) if given.logs is None else given.logs.resolve()
    arms = run(given, folder, begin)
    setting = SETTINGS[given.device]["bfloat16" if given.device == "cuda" else "float32"]
    servers = judge(arms, folder, setting.bound)
    wrong = sum(
        len(found["wrong"]) + sum(len(case["wrong"]) for case in found["cases"].values()) for found in servers.values()
    )
    import torch

    result = {
        **provenance(),
        "torch": torch.__version__,
        "seconds": round(time.time() - begin, 1),
        "setting": setting.name,
        "bound": setting.bound,
        "wrong": wrong,
        "servers": servers,
    }
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, found in servers.items():
        print(f"{name}: up after {found['start_s']} s {[said[-1500:] for said in found['wrong']]}")
        for case, figures in found["cases"].items():
            print(f"  {case}: {json.dumps(figures)[:1500]}")
    print(f"{wrong} wrong in {result['seconds']} s; logs and answers: {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
