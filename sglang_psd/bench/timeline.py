"""The step trace as a Chrome/Perfetto trace, and a picture of one pair of rounds.

Target and drafter write times of one clock, the host's monotonic clock; on a GPU the target's are CUDA events placed on
it. Open the file at https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_psd.bench.rounds import Line, is_prefill, is_verify, steady_size, target_span

TARGET, DRAFTER = 1, 2
DEVICE, HOST = 1, 2
SLOTS = "AB"


def trace_events(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Events of the Chrome trace format; microseconds from the first one on."""
    origin = min((_first_us(line) for line in lines), default=0)
    events = [
        _name(TARGET, None, "target"),
        _name(TARGET, DEVICE, "target: forward and acceptance"),
        _name(TARGET, HOST, "scheduler: launch to result"),
        _name(DRAFTER, None, "drafter"),
        _name(DRAFTER, DEVICE, "drafter: catch-up and drafting"),
    ]
    for number, line in enumerate(lines):
        if line["type"] == "Draft":
            events += _draft_events(line, number, origin)
        elif is_prefill(line):
            start, end = target_span(line)
            arguments = {"requests": line["is_prompt_run"], "tokens": line["batched_token_num"]}
            events.append(
                _span(TARGET, DEVICE, f"prefill {SLOTS[line['slot']]}", start - origin, end - start, arguments)
            )
        else:
            events += _verify_events(line, origin)
    return events


def _first_us(line: Line) -> int:
    return min(value for name, value in line.items() if name.endswith("_us") and name != "wait_us")


def _verify_events(line: Line, origin: int) -> list[dict[str, Any]]:
    slot = SLOTS[line["slot"]]
    start, end = target_span(line)
    names = ("verify_len", "accepted_num", "generated_num", "late_rows", "wait_us")
    arguments = {"requests": len(line["batched_requests"]), **{name: line[name] for name in names}}
    host = _span(TARGET, HOST, f"{slot} in flight", line["start_us"] - origin, line["end_us"] - line["start_us"], {})
    return [_span(TARGET, DEVICE, f"verify {slot}", start - origin, end - start, arguments), host]


def _draft_events(line: Line, number: int, origin: int) -> list[dict[str, Any]]:
    """The drafting, and arrows for the commit on its way there and the answer on its way back."""
    start, end = line["start_us"] - origin, line["end_us"] - origin
    commit, received = line["commit_us"] - origin, line["received_us"] - origin
    return [
        _span(DRAFTER, DEVICE, "draft", start, end - start, {"requests": len(line["batched_requests"])}),
        _arrow("s", "commit", f"c{number}", TARGET, HOST, commit),
        _arrow("f", "commit", f"c{number}", DRAFTER, DEVICE, start),
        _arrow("s", "proposals", f"p{number}", DRAFTER, DEVICE, end),
        _arrow("f", "proposals", f"p{number}", TARGET, HOST, received),
    ]


def _name(process: int, thread: int | None, name: str) -> dict[str, Any]:
    kind = "process_name" if thread is None else "thread_name"
    return {"ph": "M", "name": kind, "pid": process, "tid": thread or 0, "args": {"name": name}}


def _span(process: int, thread: int, name: str, start: int, length: int, arguments: dict) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": max(0, length),
        "args": arguments,
    }


def _arrow(phase: str, name: str, identity: str, process: int, thread: int, moment: int) -> dict[str, Any]:
    event = {"ph": phase, "cat": "handoff", "name": name, "id": identity, "pid": process, "tid": thread, "ts": moment}
    return {**event, "bp": "e"} if phase == "f" else event


def steady_window(lines: Sequence[Line]) -> tuple[int, int] | None:
    """Microseconds of one pair of rounds in the middle of the steady state; None without one.

    From one verify of a slot to the end of the same slot's next, all steps between them full verifies.
    """
    size = steady_size(lines)
    steps = sorted((line for line in lines if line["type"] == "Step"), key=target_span)
    full = [is_verify(line) and len(line["batched_requests"]) == size for line in steps]
    found = []
    for i in range(len(steps)):
        for j in range(i + 1, min(i + 4, len(steps))):
            if not full[j] or not full[i]:
                break
            if steps[j]["slot"] == steps[i]["slot"]:
                found.append((target_span(steps[i])[0], target_span(steps[j])[1]))
                break
    return found[len(found) // 2] if found else None


def write_timeline(lines: Sequence[Line], path: Path, *, title: str) -> list[Path]:
    """Write the trace to ``path`` and a picture of one pair of rounds beside it (SVG); returns what was written."""
    from sglang_psd.bench.plots import draw_rounds

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": trace_events(lines), "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")
    window = steady_window(lines)
    if window is None:
        return [path]
    picture = path.with_suffix(".svg")
    draw_rounds(lines, window, picture, title=title)
    return [path, picture]
