"""A server under load for a long time, its drafter killed every minute: no request may notice.

    python scripts/soak.py --minutes 20 --concurrency 64 --out docs/results/soak_gpu.json

One server (the embedded pair), clients that never stop, SIGKILL and SIGSTOP in turn. Every answer is compared with
plain SGLang's: on a GPU the server runs with SGLang's deterministic kernels (``tests/e2e/flags.py``).
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from scripts.fault_matrix import CONFIG, START_TIMEOUT_S, percentiles
from scripts.faults.load import Load, plain_answers, psd_section
from scripts.faults.strikes import STRIKES, strike, wait_for_mode
from scripts.record_result import machine
from sglang_psd.resources import TINY_TARGET
from sglang_psd.server_process import ServerProcess
from tests.e2e.flags import BASE_FLAGS, ENVIRONMENT, PSD_FLAGS

KINDS = ("SIGKILL", "SIGSTOP for good", "SIGKILL", "SIGSTOP for 2 s")


def resident_mb(server: ServerProcess) -> float:
    """Memory of all processes of the server."""
    root = psutil.Process(server.pid)
    return sum(process.memory_info().rss for process in [root, *root.children(recursive=True)]) / 2**20


def soak(minutes: float, every_s: float, concurrency: int, log: Path) -> dict[str, Any]:
    """Run it; returns what ``main`` writes."""
    answers = plain_answers()
    flags = ["--model-path", str(TINY_TARGET), *BASE_FLAGS, *PSD_FLAGS, "--psd-config", json.dumps(CONFIG)]
    flags += ["--max-running-requests", str(concurrency)]
    strikes, samples = [], []
    with ServerProcess(flags, log, environment=ENVIRONMENT) as server:
        server.wait_ready(START_TIMEOUT_S)
        begin = time.monotonic()
        load = Load(server.url, answers, concurrency)
        while (elapsed := time.monotonic() - begin) < 60 * minutes:
            next_at = every_s * (len(strikes) + 1)
            if elapsed < next_at:
                time.sleep(min(1.0, next_at - elapsed))
                continue
            kind = KINDS[len(strikes) % len(KINDS)]
            wait_for_mode(server.url, lambda mode: mode != "off", time.monotonic())
            strikes.append({"kind": kind, "at_s": round(elapsed), **asdict(strike(server.url, STRIKES[kind]))})
            samples.append({"at_s": round(elapsed), "resident_mb": round(resident_mb(server), 1)})
            print(f"{elapsed:6.0f} s: {len(load.done)} requests, {json.dumps(strikes[-1])}, {samples[-1]}", flush=True)
        load.stop()
        section = psd_section(server.url)
    failed = [answer.error for answer in load.done if answer.error]
    return {
        "minutes": minutes,
        "concurrency": concurrency,
        "requests": len(load.done),
        "failed_or_different": len(failed),
        "errors": sorted(set(failed))[:5],
        "request_s": percentiles([round(answer.seconds, 3) for answer in load.done]),
        "strikes": strikes,
        "resident": samples,
        "psd": section,
    }


def main() -> int:
    """Soak, write JSON; exit status 1 when a request failed or got another text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every-s", type=float, default=60, help="seconds between attacks (default 60)")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir(), "psd-soak.log"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine(),
        **soak(given.minutes, given.every_s, given.concurrency, given.log),
    }
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["failed_or_different"] else 0


if __name__ == "__main__":
    sys.exit(main())
