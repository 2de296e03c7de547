"""From requests' times to figures, and from trace lines to round times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_psd.bench.client import RequestTimes
from sglang_psd.bench.measure import client_figures, decode_rate, decode_windows, percentile, spread
from sglang_psd.bench.rounds import read_trace, round_figures


def request(start: float, ttft: float, gap: float, tokens: int, accept: float = 0.0, error: str = "") -> RequestTimes:
    latency = ttft + gap * (tokens - 1)
    return RequestTimes(start, ttft, latency, [gap] * (tokens - 1), tokens, accept, error)


def test_percentile_interpolates() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)


def test_decoding_alone_excludes_prefills_and_stragglers() -> None:
    """Two requests in flight: between the later first token (2 s) and the first end (5 s) both decode."""
    pair = [request(0.0, 1.0, 0.5, 11), request(0.0, 2.0, 0.25, 13)]
    assert decode_windows(pair, 2) == [(2.0, 5.0)]
    rate, seconds = decode_rate(pair, 2)
    assert seconds == pytest.approx(3.0)
    assert rate == pytest.approx(2.0 + 4.0)
    assert decode_windows(pair, 3) == []


def test_a_waiting_request_closes_the_window() -> None:
    trio = [request(0.0, 1.0, 1.0, 9), request(0.0, 1.0, 1.0, 5), request(5.0, 2.0, 1.0, 2)]
    assert decode_windows(trio, 2) == [(1.0, 5.0), (7.0, 8.0)]


def test_client_figures() -> None:
    figures = client_figures([request(0.0, 1.0, 0.5, 5, accept=2.5), request(0.0, 1.0, 0.5, 5, accept=1.25)], 2)
    assert (figures["completed"], figures["failed"], figures["output_tokens"]) == (2, 0, 10)
    assert figures["tok_s"] == pytest.approx(10 / 3, abs=0.01)
    assert figures["decode_tok_s"] == pytest.approx(4.0)
    assert figures["accept_length"] == pytest.approx(8 / 6, abs=1e-4), "tokens per verify, not a mean of means"
    assert figures["mean_round_ms"] == pytest.approx(1e3 * 2 * (8 / 6) / 4, abs=0.1)
    assert (figures["ttft_p50_ms"], figures["tpot_p99_ms"], figures["itl_p50_ms"]) == (1000.0, 500.0, 500.0)


def test_failed_requests_are_counted_and_left_out() -> None:
    figures = client_figures([request(0.0, 1.0, 0.5, 5), request(0.0, 0.0, 0.0, 1, error="gone")], 1)
    assert (figures["completed"], figures["failed"], figures["output_tokens"]) == (1, 1, 5)
    assert client_figures([request(0.0, 0.0, 0.0, 1, error="gone")], 1) == {"completed": 0, "failed": 1}


def test_open_arrivals_have_no_decoding_rate() -> None:
    assert client_figures([request(0.0, 1.0, 0.5, 5)], 0)["decode_tok_s"] is None


def test_spread() -> None:
    assert spread([None, 3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert spread([None]) is None


def verify(slot: int, start: int, end: int, rows: int, draft: tuple[int, int]) -> dict:
    return {
        "type": "Step", "is_prompt_run": 0, "slot": slot, "batched_requests": ["r"] * rows, "start_us": start - 50,
        "end_us": end + 50, "verify_start_us": start, "verify_end_us": end, "draft_start_us": draft[0],
        "draft_end_us": draft[1], "verify_len": 3 * rows, "late_rows": 0,
    }  # fmt: skip


def draft(start: int, end: int, rows: int) -> dict:
    return {
        "type": "Draft", "start_us": start, "end_us": end, "commit_us": start - 100, "received_us": end + 70,
        "batched_requests": ["r"] * rows,
    }  # fmt: skip


def two_slot_trace() -> list[dict]:
    """Slots take turns: 10 ms verifies 0.5 ms apart, 4 ms drafts, all inside the other slot's verify."""
    lines = [
        {"type": "Step", "is_prompt_run": 4, "slot": 0, "start_us": 0, "end_us": 9000, "batched_requests": ["r"] * 4}
    ]
    for i in range(8):
        start = 10_000 + i * 10_500
        lines.append(draft(start - 9_000, start - 5_000, 4))
        lines.append(verify(i % 2, start, start + 10_000, 4, (start - 9_000, start - 5_000)))
    lines.append(verify(0, 200_000, 205_000, 1, (190_000, 191_000)))
    return lines


def test_round_figures_of_the_steady_state() -> None:
    figures = round_figures(two_slot_trace())
    assert figures["batch"] == 4 and figures["rounds"] == 7, "not the one after the prefill, not the lone row"
    assert figures["verify_ms_p50"] == 10.0 and figures["draft_ms_p50"] == 4.0
    assert figures["round_ms_p50"] == 21.0, "a pair of rounds: from one verify of a slot to its next"
    assert figures["handoff_to_drafter_us_p50"] == 100 and figures["channel_us_p99"] == 70
    assert figures["handoff_to_target_us_p50"] == 500, "from the end of the other verify, when the drafts were ready"
    assert figures["target_bubble"] == pytest.approx(0.5 / 10.5, abs=1e-4)
    assert figures["overlap"] == 1.0, "all drafting fell into the verify before it"
    assert (figures["late_rows"], figures["drafts_per_row"]) == (0, 3.0)


def test_a_busy_drafter_is_no_handoff() -> None:
    """Drafts that follow each other without a pause, each asked for long before: only the pause between them counts."""
    lines = [verify(0, 0, 100, 2, (0, 0)), verify(0, 100, 200, 2, (0, 0))]
    lines += [{**draft(1000 * i, 1000 * i + 990, 2), "commit_us": 1000 * i - 900} for i in range(1, 6)]
    assert round_figures(lines)["handoff_to_drafter_us_p50"] == 10


def test_no_rounds_no_figures() -> None:
    assert round_figures([]) == {}


def test_trace_is_read_from_an_offset_and_without_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [json.dumps({"n": n}) + "\n" for n in range(3)]
    path.write_text("".join(lines) + '{"n": 3')
    assert read_trace(path, len(lines[0])) == [{"n": 1}, {"n": 2}]
    assert read_trace(tmp_path / "none.jsonl") == []
