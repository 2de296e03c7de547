"""Round times out of the step trace (docs/trace.md): T_v, T_d, handoffs, bubbles, overlap. Pure arithmetic."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_psd.bench.measure import percentile
from sglang_psd.telemetry.intervals import overlap_s

Line = dict[str, Any]


def read_trace(path: Path, offset: int = 0) -> list[Line]:
    """Lines of a step trace from byte ``offset`` on; a line that is still being written is left out."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        file.seek(offset)
        text = file.read()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines() if line]


def is_verify(line: Line) -> bool:
    """Whether the line is a verify."""
    return line["type"] == "Step" and not line["is_prompt_run"]


def is_prefill(line: Line) -> bool:
    """Whether the line is a prefill of the target."""
    return line["type"] == "Step" and bool(line["is_prompt_run"])


def target_span(line: Line) -> tuple[int, int]:
    """Microseconds in which the target worked on this step."""
    return (line["start_us"], line["end_us"]) if is_prefill(line) else (line["verify_start_us"], line["verify_end_us"])


def steady_size(lines: Sequence[Line]) -> int | None:
    """The batch size that most verifies had."""
    sizes = Counter(len(line["batched_requests"]) for line in lines if is_verify(line))
    return sizes.most_common(1)[0][0] if sizes else None


def steady_verifies(lines: Sequence[Line], size: int) -> list[tuple[Line, Line]]:
    """Pairs (verify, the target's step before it) in which both are verifies of ``size`` requests."""
    steps = sorted((line for line in lines if line["type"] == "Step"), key=target_span)
    pairs = zip(steps[1:], steps)
    return [(now, before) for now, before in pairs if all(_full(line, size) for line in (now, before))]


def _full(line: Line, size: int) -> bool:
    return is_verify(line) and len(line["batched_requests"]) == size


def round_figures(lines: Sequence[Line]) -> dict[str, Any]:
    """Figures of the rounds with the usual batch size that follow another such round.

    Returns
    -------
    dict
        ``batch`` (b of T_v and T_d) and ``rounds``. With ``_p50`` and ``_p99``: ``verify_ms``; ``draft_ms``;
        ``round_ms``, from one verify of a slot to its next, a pair of rounds in parallel mode;
        ``handoff_to_drafter_us`` and ``handoff_to_target_us``, from the moment at which both the tokens and the one
        who waits for them are ready; ``channel_us``, from answer written to answer read. ``target_bubble``, the share
        of the time in which the target waited; ``overlap``, the share of the drafting in which the target worked;
        ``late_rows``; ``drafts_per_row``. Empty without rounds.
    """
    size = steady_size(lines)
    if size is None:
        return {}
    pairs = steady_verifies(lines, size)
    verifies = [now for now, _ in pairs]
    drafts = [line for line in lines if line["type"] == "Draft" and len(line["batched_requests"]) == size]
    figures: dict[str, Any] = {"batch": size, "rounds": len(pairs)}
    samples = {
        "verify_ms": [(end - start) / 1e3 for start, end in map(target_span, verifies)],
        "draft_ms": [(line["end_us"] - line["start_us"]) / 1e3 for line in drafts],
        "round_ms": _round_times(lines, size),
        "handoff_to_drafter_us": _to_drafter(lines, size),
        "handoff_to_target_us": [
            max(0, target_span(now)[0] - max(now["draft_end_us"], target_span(before)[1]))
            for now, before in pairs
            if "draft_end_us" in now
        ],
        "channel_us": [line["received_us"] - line["end_us"] for line in drafts],
    }
    for name, values in samples.items():
        for percent in (50, 99):
            value = percentile(values, percent)
            figures[f"{name}_p{percent}"] = None if value is None else round(value, 3)
    figures["target_bubble"] = _bubble(pairs)
    figures["overlap"] = _overlap(lines, drafts)
    rows = sum(len(line["batched_requests"]) for line in verifies)
    figures["late_rows"] = sum(line["late_rows"] for line in verifies)
    figures["drafts_per_row"] = round(sum(line["verify_len"] for line in verifies) / rows, 3) if rows else None
    return figures


def _to_drafter(lines: Sequence[Line], size: int) -> list[int]:
    """Microseconds from a commit, or from the end of the drafting before it, to the start of its drafting."""
    ordered = sorted((line for line in lines if line["type"] == "Draft"), key=lambda line: line["start_us"])
    free = [0, *(line["end_us"] for line in ordered)]
    return [
        max(0, line["start_us"] - max(line["commit_us"], ready))
        for line, ready in zip(ordered, free)
        if len(line["batched_requests"]) == size
    ]


def _round_times(lines: Sequence[Line], size: int) -> list[float]:
    """Milliseconds between the starts of a slot's successive verifies, where nothing but verifies lay between."""
    steps = sorted((line for line in lines if line["type"] == "Step"), key=target_span)
    last: dict[int, int] = {}
    times = []
    for line in steps:
        if not _full(line, size):
            last.clear()
            continue
        start = target_span(line)[0]
        if line["slot"] in last:
            times.append((start - last[line["slot"]]) / 1e3)
        last[line["slot"]] = start
    return times


def _bubble(pairs: Sequence[tuple[Line, Line]]) -> float | None:
    waited = sum(max(0, target_span(now)[0] - target_span(before)[1]) for now, before in pairs)
    worked = sum(target_span(now)[1] - target_span(now)[0] for now, _ in pairs)
    return round(waited / (waited + worked), 4) if worked else None


def _overlap(lines: Sequence[Line], drafts: Sequence[Line]) -> float | None:
    work = [
        (float(start), float(end)) for start, end in (target_span(line) for line in lines if line["type"] == "Step")
    ]
    drafted = sum(line["end_us"] - line["start_us"] for line in drafts)
    covered = sum(overlap_s((line["start_us"], line["end_us"]), work) for line in drafts)
    return round(min(1.0, covered / drafted), 4) if drafted else None
