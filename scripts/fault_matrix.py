"""Attack a server's drafter in every way, and write down what its users noticed.

    python scripts/fault_matrix.py --repeats 5 --out docs/results/faults_cpu.json

Three parts. *Losses*: a server under load, its drafter attacked again and again; every answer is compared with plain
SGLang's, and the times until the server noticed and until it drafted again are recorded. Before each attack the clients
rest until the server has a standby at hand: under load on few cores that takes minutes. *Wire*: the test rig with a
proxy between scheduler and drafter that delays, repeats, swaps, drops, cuts and changes messages. *Starts*: servers
that cannot come up, and what they say and leave behind.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the rig forks
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.faults.load import Load
from scripts.faults.standby import standby_cost
from scripts.faults.starts import STARTS, try_start
from scripts.faults.strikes import LOSSES, STRIKES, Recovery, drafter_of, strike, wait_until_well
from scripts.faults.subject import CONFIG, Subject, add_flags
from scripts.record_result import provenance, write_result

PARTS = ("losses", "wire", "starts")
Note = Callable[[Any], None]


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p99 and the largest (nearest rank)."""
    ordered = sorted(round(value, 3) for value in values)
    rank = {name: ordered[max(0, math.ceil(share * len(ordered)) - 1)] for name, share in (("p50", 0.5), ("p99", 0.99))}
    return {**rank, "max": ordered[-1]}


def attack_repeatedly(load: Load, url: str, name: str, repeats: int, idle: bool = False) -> dict[str, Any]:
    """One row of the matrix."""
    begin, recoveries = time.monotonic(), list[Recovery]()
    for _ in range(repeats):
        load.pause()
        wait_until_well(url)
        if not idle:
            load.resume()
            load.await_answers(load.concurrency)
        recoveries.append(strike(url, STRIKES[name]))
        load.resume()
        load.await_answers(load.concurrency)
        print(f"  {name}: {recoveries[-1]}", flush=True)
    seen = load.since(begin)
    errors = sorted({answer.error for answer in seen if answer.error})
    return {
        "fault": f"{name}, idle" if idle else name,
        "repeats": repeats,
        "detected_s": percentiles([recovery.detected_s for recovery in recoveries]),
        "recovered_s": percentiles([recovery.recovered_s for recovery in recoveries]),
        "engine_load_s": percentiles([recovery.load_s for recovery in recoveries]),
        "requests": len(seen),
        "failed_or_different": sum(answer.error is not None for answer in seen),
        "other_texts": sum(answer.same is not None for answer in seen),
        "errors": errors[:5],
        "request_s": percentiles([answer.seconds for answer in seen]) if seen else None,
    }


def run_losses(subject: Subject, repeats: int, note: Note, chosen: Sequence[str] = LOSSES) -> dict[str, Any]:
    """The first part; ``note`` is told what has been seen after every row."""
    with subject.under_load() as (server, load):
        # What one request takes while nothing happens.
        load.await_answers(4 * load.concurrency)
        quiet = percentiles([answer.seconds for answer in load.done])
        found = {"concurrency": load.concurrency, "settings": subject.settings, "config": CONFIG}
        found = {**found, "quiet_request_s": quiet, "chosen": list(chosen), "rows": []}
        for name in chosen:
            idle = name.endswith(", idle")
            found["rows"].append(attack_repeatedly(load, server.url, name.removesuffix(", idle"), repeats, idle))
            note(found)
        load.pause()
        wait_until_well(server.url)
        found["drafter_runs"] = drafter_of(server.url).is_running()
        found["standby"] = standby_cost(drafter_of(server.url))
        load.resume()
    return found


def run_wire(seeds: int) -> list[dict[str, Any]]:
    """The second part; in this process and its forks."""
    from tests.models import build_models
    from tests.rig.fork import run_forked
    from tests.rig.oracle import Oracle
    from tests.rig.preload import preload
    from tests.rig.proxy import FAULTS
    from tests.rig.test_faults import LENGTH, PROMPTS, run_on_a_bad_wire

    preload()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        models = build_models(Path(folder))
        truth = [ids[:LENGTH] for ids in Oracle(run_forked, models).greedy(PROMPTS)] * 2
        for name in FAULTS:
            runs = [run_forked(run_on_a_bad_wire, models, name, "overlapped", seed) for seed in range(seeds)]
            rows.append(
                {
                    "fault": name,
                    "runs": seeds,
                    "frames_harmed": sum(run.harmed for run in runs),
                    "requests": sum(len(run.outputs) for run in runs),
                    "failed_or_different": sum(
                        output.ids != ids for run in runs for output, ids in zip(run.outputs, truth)
                    ),
                    "drafters_lost": sum(run.report["drafter"]["restarts"] for run in runs),
                    "agreed_s": percentiles([round(run.agreed_s, 3) for run in runs]),
                }
            )
            print(f"  {json.dumps(rows[-1])}", flush=True)
    return rows


def run_starts() -> list[dict[str, Any]]:
    """The third part."""
    rows = []
    for name, (obstacle, needle) in STARTS.items():
        with obstacle() as (flags, port, environment):
            rows.append({"fault": name, **asdict(try_start(flags, port, environment, needle))})
        print(f"  {json.dumps(rows[-1])}", flush=True)
    return rows


def main() -> int:
    """Run the chosen parts, write JSON; exit status 1 when a request failed or a start left something behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="attacks of each kind (default 5)")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument(
        "--losses", nargs="+", default=LOSSES, choices=LOSSES, metavar="FAULT", help="rows of that part"
    )
    parser.add_argument("--out", type=Path, help="write the figures there as JSON; other parts in it are kept")
    add_flags(parser, concurrency=8, log=Path(tempfile.gettempdir(), "psd-faults.log"))
    given = parser.parse_args()

    def write(part: str, result: Any) -> None:
        if given.out is not None:
            known = json.loads(given.out.read_text()) if given.out.exists() else {}
            write_result(given.out, {**known, part: {**provenance(), "result": result}})

    def losses() -> dict[str, Any]:
        subject = Subject.from_command_line(given)
        return run_losses(subject, given.repeats, lambda result: write("losses", result), given.losses)

    runs = {"losses": losses, "wire": lambda: run_wire(given.repeats), "starts": run_starts}
    found: dict[str, Any] = {}
    for part in given.parts:
        found[part] = runs[part]()
        write(part, found[part])
    rows = [*found.get("losses", {}).get("rows", []), *found.get("wire", [])]
    bad_starts = [row for row in found.get("starts", []) if not row["exit_code"] or row["processes_left"]]
    return 1 if bad_starts or any(row["failed_or_different"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
