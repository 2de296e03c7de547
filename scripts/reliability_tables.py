"""Write the tables of docs/reliability.md from the JSON files that the runs left in docs/results.

python scripts/reliability_tables.py            # rewrite what stands between the marks
python scripts/reliability_tables.py --check    # exit status 1 when the page is out of date
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.faults.strikes import LOSSES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "docs" / "results"
BEGIN, END = "<!-- tables: begin (scripts/reliability_tables.py) -->", "<!-- tables: end -->"


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def spread(found: dict[str, float] | None) -> str:
    """p50 / p99 as text."""
    return "–" if found is None else f"{found['p50']:.2f} / {found['p99']:.2f}"


def source(part: dict[str, Any]) -> str:
    """Where figures come from, in one line."""
    return f"`{part['command']}`, {part['machine']}" + (f", {part['date']}" if "date" in part else "")


def hardware(part: dict[str, Any]) -> str:
    """For a heading."""
    if part["machine"].endswith("no GPU"):
        return "without a GPU"
    return "both models on one GPU" if ", 1 x " in part["machine"] else "on two GPUs"


def losses(part: dict[str, Any]) -> str:
    """The drafter attacked under load."""
    result = part["result"]
    rows = [
        [
            row["fault"],
            row["repeats"],
            spread(row["detected_s"]),
            spread(row["recovered_s"]),
            f"{row['failed_or_different']} of {row['requests']}",
            spread(row["request_s"]),
        ]
        for row in result["rows"]
    ]
    head = [
        "Fault",
        "times",
        "noticed, s p50/p99",
        "drafting again, s p50/p99",
        "requests failed",
        "request, s p50/p99",
    ]
    quiet, hung = spread(result["quiet_request_s"]), result["config"]["hung_after_s"]
    note = f"{result['concurrency']} clients; `hung_after_s` {hung}; a request without any fault: {quiet} s."
    note += default_settings(result, sum(row["other_texts"] for row in result["rows"])) + standby(result)
    missing = set(result.get("chosen", LOSSES)) - {row["fault"] for row in result["rows"]}
    if missing:
        note += f" Stopped before {' and '.join(f'“{name}”' for name in sorted(missing))}."
    return f"### A drafter is lost under load, {hardware(part)}\n\n{source(part)}. {note}\n\n{table(head, rows)}\n"


def standby(result: dict[str, Any]) -> str:
    """What the standby holds, where that was measured."""
    if "standby" not in result:
        return ""
    host, gpu = result["standby"]["resident_mb"], result["standby"]["gpu_mb"]
    return f" The standby: {host} MB of host memory" + ("." if gpu is None else f", {gpu} MB of the GPUs'.")


def default_settings(result: dict[str, Any], other_texts: int) -> str:
    """What has to be said of texts where near ties may fall either way."""
    if result["settings"] == "exact":
        return ""
    return f" SGLang's default kernels: {other_texts} texts differ from those of SGLang without speculation somewhere."


def wire(part: dict[str, Any]) -> str:
    """Messages damaged."""
    rows = [
        [
            row["fault"],
            row["frames_harmed"],
            f"{row['failed_or_different']} of {row['requests']}",
            row["drafters_lost"],
            spread(row["agreed_s"]),
        ]
        for row in part["result"]
    ]
    head = ["Messages are", "harmed", "requests failed", "drafters lost", "in step again, s p50/p99"]
    return f"### The wire is bad\n\n{source(part)}.\n\n{table(head, rows)}\n"


def starts(part: dict[str, Any]) -> str:
    """Servers that cannot come up."""
    rows = [
        [row["fault"], row["exit_code"], row["seconds"], row["processes_left"], sentence_of(row["sentence"])]
        for row in part["result"]
    ]
    head = ["Obstacle", "exit status", "after, s", "processes left", "the log says"]
    return f"### A server cannot start\n\n{source(part)}.\n\n{table(head, rows)}\n"


def sentence_of(line: str) -> str:
    """The message in a line of a log, fit for a table."""
    for mark in ("Error: ", "] "):
        line = line.rpartition(mark)[2] if mark in line else line
    return line.replace("|", "\\|").strip()


def endurance(result: dict[str, Any]) -> str:
    """Thousands of requests."""
    strikes = result["strikes"]
    noticed = sorted(strike["noticed_s"] for strike in strikes)
    mended = sorted(strike["recovery_s"] for strike in strikes)
    slope = result["rss_slope"]
    rows = [
        ["requests; aborted; wrong or failed", f"{result['requests']}; {result['aborted']}; {len(result['wrong'])}"],
        ["retractions; pauses that retracted everything", f"{result['retractions']}; {result['pauses']}"],
        ["attacks; noticed at the latest; drafting again", f"{len(strikes)}; {noticed[-1]} s; {mended[-1]} s"],
        ["held by either side when drained, at most", result["most_held_after_a_window"]],
        [
            "accept length, first and last thousand",
            f"{result['accept_length_first_window']}, {result['accept_length_last_window']}",
        ],
        [
            "growth of the scheduler's memory, second half",
            f"{slope['mb_per_1000_requests']} ± {slope['standard_error']} MB per 1,000 requests",
        ],
    ]
    head = ["Endurance", f"{result['seconds']:.0f} s"]
    return f"### Endurance\n\n{source(result)}.\n\n{table(head, rows)}\n"


def soak(result: dict[str, Any]) -> str:
    """A server for minutes."""
    strikes, resident = result["strikes"], [sample["resident_mb"] for sample in result["resident"]]
    noticed = [strike["detected_s"] for strike in strikes]
    again = [strike["recovered_s"] for strike in strikes]
    rows = [
        [
            "clients; requests; failed",
            f"{result['concurrency']}; {result['requests']}; {result['failed_or_different']}",
        ],
        ["attacks; noticed, s p50/max", f"{len(strikes)}; {statistics.median(noticed):.2f} / {max(noticed):.2f}"],
        ["drafting again, s p50/max", f"{statistics.median(again):.2f} / {max(again):.2f}"],
        ["request, s p50/p99", spread(result["request_s"])],
        ["memory of all processes, first and last attack", f"{resident[0]:.0f}, {resident[-1]:.0f} MB"],
    ]
    note = default_settings(result, result["other_texts"]) + standby(result)
    planned = re.search(r"--minutes ([0-9.]+)", result["command"])
    if planned and result["minutes"] < float(planned[1]):
        note += f" Cut off after {result['minutes']} minutes."
    head = ["Soak", f"{result['minutes']} minutes"]
    return f"### Soak, {hardware(result)}\n\n{source(result)}.{note}\n\n{table(head, rows)}\n"


# File, key of the part in it (None: the file is the part), and what writes it.
SECTIONS: tuple[tuple[str, str | None, Callable[[dict[str, Any]], str]], ...] = (
    ("faults_cpu.json", "losses", losses),
    ("faults_gpu.json", "losses", losses),
    ("faults_gpu_rest.json", "losses", losses),
    ("faults_gpu_default.json", "losses", losses),
    ("faults_one_gpu.json", "losses", losses),
    ("faults_cpu.json", "wire", wire),
    ("faults_cpu.json", "starts", starts),
    ("faults_gpu.json", "starts", starts),
    ("endurance_cpu.json", None, endurance),
    ("soak_cpu.json", None, soak),
    ("soak_gpu_short.json", None, soak),
    ("soak_gpu.json", None, soak),
    ("soak_gpu_default.json", None, soak),
    ("soak_one_gpu.json", None, soak),
)


def tables() -> str:
    """All sections whose results exist."""
    parts = []
    for name, key, write in SECTIONS:
        if not (RESULTS / name).exists():
            continue
        found = json.loads((RESULTS / name).read_text())
        part = found if key is None else found.get(key)
        if part is not None:
            parts.append(write(part))
    return "\n".join(parts)


def main() -> int:
    """Rewrite the page, or compare it."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    wanted = f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.split(END)[1]}"
    if "--check" in sys.argv:
        if wanted != text:
            print("docs/reliability.md is not what docs/results says; run scripts/reliability_tables.py.")
        return int(wanted != text)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
