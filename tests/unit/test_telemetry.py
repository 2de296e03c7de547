"""Overlap arithmetic, running figures, trace lines."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_psd.telemetry.intervals import OverlapMeter, overlap_s
from sglang_psd.telemetry.stats import PSDStats, RoundRecord
from sglang_psd.telemetry.trace import TraceWriter, round_to_json

RECORD = RoundRecord(
    slot=1,
    mode="parallel",
    sizes=(2, 3),
    rids=["a", "b", "c"],
    num_steps=4,
    verified=12,
    accepted=7,
    emitted=10,
    rows_with_drafts=3,
    late_rows=0,
    wait_s=0.001,
    launch_s=10.0,
    verify_start_s=10.001,
    verify_end_s=10.021,
    result_s=10.022,
    commit_s=10.0225,
    draft_start_s=9.98,
    draft_end_s=9.9995,
    preempted=[],
)


@given(
    st.lists(st.integers(0, 60), min_size=2, max_size=12, unique=True),
    st.tuples(st.integers(0, 60), st.integers(0, 60)),
)
def test_overlap_counts_common_seconds(edges: list[int], span: tuple[int, int]) -> None:
    edges = sorted(edges)
    others = [(float(a), float(b)) for a, b in zip(edges[::2], edges[1::2])]
    start, end = min(span), max(span)
    naive = sum(any(a <= second < b for a, b in others) for second in range(start, end))
    assert overlap_s((start, end), others) == naive


def test_meter_settles_what_can_no_longer_grow() -> None:
    meter = OverlapMeter()
    assert meter.fraction == 0.0
    meter.add_draft(1.0, 3.0)
    meter.add_verify(0.0, 2.0)
    assert meter.draft_s == 0.0, "a later verify may still cover the rest"
    meter.add_verify(2.5, 4.0)
    assert meter.draft_s == 2.0 and meter.overlapped_s == pytest.approx(1.5)
    assert meter.fraction == pytest.approx(0.75)
    meter.add_draft(5.0, 5.0)
    meter.add_verify(6.0, 6.0)
    assert meter.draft_s == 2.0


def test_figures() -> None:
    stats = PSDStats()
    assert stats.summary()["accept_length"] == 0.0
    stats.add_round(RECORD)
    later = {"verify_start_s": 10.031, "verify_end_s": 10.061, "late_rows": 1, "preempted": ["x"]}
    stats.add_round(dataclasses.replace(RECORD, **later))
    stats.add_draft(9.9, 9.98, 9.9995)
    summary = stats.summary()
    assert summary["rounds"] == 2
    assert summary["accept_length"] == pytest.approx(20 / 6, abs=1e-4)
    assert summary["accept_rate"] == pytest.approx(14 / 24, abs=1e-4)
    assert summary["verify_ms"] == pytest.approx(25.0)
    assert summary["target_bubble_ms"] == pytest.approx(10.0)
    assert summary["handoff_to_target_us"] == pytest.approx(500.0)
    assert summary["handoff_to_drafter_us"] == pytest.approx(80_000.0)
    assert (summary["late_rows"], summary["retractions"]) == (1, 1)
    json.dumps(summary)


def test_idle_time_is_no_bubble() -> None:
    stats = PSDStats()
    stats.add_round(RECORD)
    stats.pause()
    stats.add_round(dataclasses.replace(RECORD, verify_start_s=99.0, verify_end_s=99.1))
    assert stats.summary()["target_bubble_ms"] == 0.0


def test_trace_line() -> None:
    line = round_to_json(3, RECORD)
    assert line["tid"] == "Step:3" and line["is_parallelised"] is True
    assert (line["start_us"], line["verify_end_us"]) == (10_000_000, 10_021_000)
    assert (line["proposed_len"], line["verify_len"], line["accepted_num"], line["generated_num"]) == (4, 12, 7, 10)
    assert line["measured_draft_time"] == pytest.approx(0.0195)
    assert "preempted_requests" not in line
    bare = round_to_json(0, dataclasses.replace(RECORD, draft_start_s=None, draft_end_s=None, sizes=(5, 0)))
    assert "draft_start_us" not in bare and "measured_draft_time" not in bare
    assert bare["is_parallelised"] is False


def test_trace_file_is_json_lines(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(str(path))
    for _ in range(70):
        writer.write_round(RECORD)
    writer.write_prefill(0, ["a"], 12, 1.0, 2.0)
    writer.write_draft(5, ["a"], 1.0, 2.0, (1.2, 1.8))
    assert path.stat().st_size > 0, "nothing is written before the end"
    writer.close()
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert len(lines) == 72
    assert [line["tid"] for line in lines[:2]] == ["Step:0", "Step:1"]
    assert lines[-2]["is_prompt_run"] == 1 and lines[-1]["type"] == "Draft"
    assert lines[-1]["end_us"] - lines[-1]["start_us"] == 600_000


def test_a_full_disk_ends_the_trace_only(caplog, recwarn) -> None:
    writer = TraceWriter("/dev/full")
    for _ in range(3):
        writer.write_round(RECORD)
    writer.flush()
    assert "the trace /dev/full ends here (" in caplog.text and "serving goes on" in caplog.text
    writer.write_round(RECORD)
    writer.flush()
    writer.close()
    assert len(caplog.records) == 1 and not list(recwarn)


def test_the_page_lists_every_field_and_no_other(tmp_path) -> None:
    """docs/trace.md, by a file with one line of each kind."""
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(str(path))
    writer.write_round(dataclasses.replace(RECORD, preempted=["d"]))
    writer.write_prefill(0, ["a"], 7, 1.0, 2.0)
    writer.write_draft(3, ["a"], 1.0, 4.0, (2.0, 3.0))
    writer.close()
    kinds = [set(json.loads(line)) - {"type"} for line in path.read_text().splitlines()]
    page = (Path(__file__).parents[2] / "docs" / "trace.md").read_text(encoding="utf-8")
    for written, section in zip(kinds, page.split("\n## ")[1:]):
        rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        assert set(re.findall(r"`(\w+)`", " ".join(rows))) == written, section.splitlines()[0]
