"""Where the host's time goes in a round of a PSD server, function by function, on one clock for both processes.

    python scripts/profile_round.py --out profile.json -- sglang-psd bench --arms sequential -N 8,64 --batches 1 ...

Runs any command that starts a PSD server (the benchmark is the handy one) with stamps on chosen functions of scheduler
and drafter, and prints when each begins and ends, in milliseconds after a verify's result was there: medians over the
rounds of each batch size. Rounds of 0.2 s and more (starts, pauses) are left out.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.record_result import ROOT, provenance, write_result
from scripts.round_profile.stamps import ROUND_ENDS, SIZED

LONGEST_S = 0.2
# A step that fewer of the rounds have is none of the usual ones.
LEAST_SHARE = 0.5
Stamp = tuple[str, float, float, int]


def profile(processes: list[list[Stamp]]) -> dict[str, Any]:
    """Median begin and end of every step, by batch size.

    Parameters
    ----------
    processes : list of list of (name, begin, end, size)
        Seconds of one clock; the n-th call of a function within a round is a step of its own.

    Returns
    -------
    dict
        By size: ``rounds``, ``round_ms``, and ``steps`` in order, with ``name``, ``begin_ms``, ``end_ms``, ``rounds``.
    """
    stamps = sorted((stamp for process in processes for stamp in process), key=lambda stamp: stamp[1])
    begins = [begin for _, begin, _, _ in stamps]
    ends = sorted(end for name, _, end, _ in stamps if name == ROUND_ENDS)
    lengths: dict[int, list[float]] = defaultdict(list)
    steps: dict[int, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for start, stop in pairwise(ends):
        inside = stamps[bisect.bisect_left(begins, start) : bisect.bisect_left(begins, stop)]
        size = next((size for name, _, _, size in inside if name == SIZED), 0)
        if not size or stop - start > LONGEST_S:
            continue
        lengths[size].append(stop - start)
        calls: dict[str, int] = defaultdict(int)
        for name, begin, end, _ in inside:
            calls[name] += 1
            steps[size][f"{name} {calls[name]}"].append((begin - start, end - start))
    return {
        str(size): {
            "rounds": len(lengths[size]),
            "round_ms": round(1e3 * statistics.median(lengths[size]), 3),
            "steps": sorted(
                (
                    {
                        "name": name,
                        "begin_ms": round(1e3 * statistics.median(begin for begin, _ in spans), 3),
                        "end_ms": round(1e3 * statistics.median(end for _, end in spans), 3),
                        "rounds": len(spans),
                    }
                    for name, spans in steps[size].items()
                    if len(spans) >= LEAST_SHARE * len(lengths[size])
                ),
                key=lambda step: (step["begin_ms"], -step["end_ms"]),
            ),
        }
        for size in sorted(lengths)
    }


def show(found: dict[str, Any]) -> None:
    """Print a profile."""
    for size, rounds in found.items():
        print(f"{size} requests, {rounds['rounds']} rounds of {rounds['round_ms']} ms")
        for step in rounds["steps"]:
            took = step["end_ms"] - step["begin_ms"]
            print(f"  {step['begin_ms']:8.3f} {step['end_ms']:8.3f} {took:8.3f}  {step['name']}")


def main() -> int:
    """Run the command, read the stamps; passes the command's exit status on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the profile there as JSON")
    parser.add_argument("command", nargs="+", help="after --: what starts the server")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="psd-stamps-") as folder:
        Path(folder, "sitecustomize.py").write_text(
            f"import sys\nsys.path.append({str(ROOT)!r})\nfrom scripts.round_profile.stamps import install\ninstall()\n"
        )
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PSD_STAMPS": folder, "PYTHONPATH": os.pathsep.join(paths)}
        status = subprocess.run(given.command, env=environment).returncode
        found = profile([json.loads(file.read_text()) for file in Path(folder).glob("*.json")])
    show(found)
    if given.out is not None:
        write_result(given.out, {**provenance(), "profile": found})
    return status


if __name__ == "__main__":
    sys.exit(main())
