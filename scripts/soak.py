"""A server under load for a long time, its drafter killed every minute: no request may notice.

    python scripts/soak.py --minutes 20 --concurrency 64 --out docs/results/soak_gpu.json
    python scripts/soak.py --minutes 6 --every-s 30 --out docs/results/soak_gpu.json    # where a command may take ten

One server (the embedded pair), clients that never stop, SIGKILL and SIGSTOP in turn. Every answer is compared with
plain SGLang's: on a GPU the server runs with SGLang's deterministic kernels (``tests/e2e/flags.py``). The file is
written after every attack: a run that is cut short leaves what it has seen.
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

from scripts.fault_matrix import CONFIG, START_TIMEOUT_S, Note, percentiles
from scripts.faults.load import Load, plain_answers, psd_section, warm_up
from scripts.faults.strikes import STRIKES, drafts, strike, wait_for
from scripts.record_result import provenance, write_result
from sglang_psd.resources import TINY_TARGET
from sglang_psd.server_process import ServerProcess
from tests.e2e.flags import BASE_FLAGS, ENVIRONMENT, PSD_FLAGS

KINDS = ("SIGKILL", "SIGSTOP for good", "SIGKILL", "SIGSTOP for 2 s")


def resident_mb(server: ServerProcess) -> float:
    """Memory of all processes of the server, the standby included."""
    root, total = psutil.Process(server.pid), 0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # ended since it was listed
            total += process.memory_info().rss
    return total / 2**20


def soak(
    minutes: float, every_s: float, concurrency: int, log: Path, note: Note, start_timeout_s: float = START_TIMEOUT_S
) -> dict[str, Any]:
    """Run it; returns what ``main`` writes, and tells ``note`` the same after every attack."""
    answers = plain_answers(start_timeout_s)
    flags = ["--model-path", str(TINY_TARGET), *BASE_FLAGS, *PSD_FLAGS, "--psd-config", json.dumps(CONFIG)]
    flags += ["--max-running-requests", str(concurrency)]
    strikes: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    with ServerProcess(flags, log, environment=ENVIRONMENT) as server:
        server.wait_ready(start_timeout_s)
        warm_up(server.url, answers)
        begin = time.monotonic()
        load = Load(server.url, answers, concurrency)

        def found() -> dict[str, Any]:
            done = list(load.done)
            failed = [answer.error for answer in done if answer.error]
            return {
                "minutes": round((time.monotonic() - begin) / 60, 2),
                "concurrency": concurrency,
                "config": CONFIG,
                "requests": len(done),
                "failed_or_different": len(failed),
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
        load.stop()
        return found()


def main() -> int:
    """Soak, write JSON; exit status 1 when a request failed or got another text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every-s", type=float, default=60, help="seconds between attacks (default 60)")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir(), "psd-soak.log"))
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--start-timeout", type=float, default=START_TIMEOUT_S, metavar="SECONDS", help="longest start (default 600)"
    )
    given = parser.parse_args()

    def write(result: dict[str, Any]) -> None:
        if given.out is not None:
            write_result(given.out, {**provenance(), **result})

    result = soak(given.minutes, given.every_s, given.concurrency, given.log, write, given.start_timeout)
    write(result)
    return 1 if result["failed_or_different"] else 0


if __name__ == "__main__":
    sys.exit(main())
