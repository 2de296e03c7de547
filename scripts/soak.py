"""A server under load for a long time, its drafter killed every minute: no request may notice.

    python scripts/soak.py --minutes 20 --concurrency 64 --out docs/results/soak_gpu.json
    python scripts/soak.py --minutes 6 --every-s 30 --out docs/results/soak_gpu.json    # where a command may take ten

One server (the embedded pair), clients that never stop, SIGKILL and SIGSTOP in turn. Every answer is compared with
plain SGLang's: on a GPU the server runs with SGLang's deterministic kernels (``tests/e2e/flags.py``), unless
``--settings default`` asks for the usual ones. The file is written after every attack: a run that is cut short leaves
what it has seen. At the end, with no request running, it is measured what the standby holds; where another program
comes or goes on the same GPU just then, its memory is counted, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from scripts.fault_matrix import Note, percentiles
from scripts.faults.load import psd_section
from scripts.faults.standby import standby_cost
from scripts.faults.strikes import STRIKES, drafter_of, drafts, strike, wait_for, wait_until_well
from scripts.faults.subject import CONFIG, Subject, add_flags
from scripts.record_result import provenance, write_result
from sglang_psd.server_process import ServerProcess

KINDS = ("SIGKILL", "SIGSTOP for good", "SIGKILL", "SIGSTOP for 2 s")


def resident_mb(server: ServerProcess) -> float:
    """Memory of all processes of the server, the standby included."""
    root, total = psutil.Process(server.pid), 0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # ended since it was listed
            total += process.memory_info().rss
    return total / 2**20


def soak(subject: Subject, minutes: float, every_s: float, note: Note) -> dict[str, Any]:
    """Run it; returns what ``main`` writes, and tells ``note`` the same after every attack."""
    strikes: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    with subject.under_load() as (server, load):
        begin = time.monotonic()

        def found() -> dict[str, Any]:
            done = list(load.done)
            failed = [answer.error for answer in done if answer.error]
            return {
                "minutes": round((time.monotonic() - begin) / 60, 2),
                "concurrency": load.concurrency,
                "settings": subject.settings,
                "config": CONFIG,
                "requests": len(done),
                "failed_or_different": len(failed),
                "other_texts": sum(answer.same is not None for answer in done),
                "errors": sorted(set(failed))[:5],
                "request_s": percentiles([answer.seconds for answer in done]) if done else None,
                "strikes": strikes,
                "resident": samples,
                "psd": psd_section(server.url),
            }

        while (elapsed := time.monotonic() - begin) < 60 * minutes:
            next_at = every_s * (len(strikes) + 1)
            if elapsed < next_at:
                time.sleep(min(1.0, next_at - elapsed))
                continue
            kind = KINDS[len(strikes) % len(KINDS)]
            wait_for(server.url, drafts, time.monotonic())
            strikes.append({"kind": kind, "at_s": round(elapsed), **asdict(strike(server.url, STRIKES[kind]))})
            samples.append({"at_s": round(elapsed), "resident_mb": round(resident_mb(server), 1)})
            print(f"{elapsed:6.0f} s: {len(load.done)} requests, {json.dumps(strikes[-1])}, {samples[-1]}", flush=True)
            note(found())
        load.pause()
        wait_until_well(server.url)
        standby = standby_cost(drafter_of(server.url))
        load.resume()
        load.stop()
        return {**found(), "standby": standby}


def main() -> int:
    """Soak, write JSON; exit status 1 when a request failed or got another text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every-s", type=float, default=60, help="seconds between attacks (default 60)")
    add_flags(parser, concurrency=64, log=Path(tempfile.gettempdir(), "psd-soak.log"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()

    def write(result: dict[str, Any]) -> None:
        if given.out is not None:
            write_result(given.out, {**provenance(), **result})

    result = soak(Subject.from_command_line(given), given.minutes, given.every_s, write)
    write(result)
    return 1 if result["failed_or_different"] else 0


if __name__ == "__main__":
    sys.exit(main())
