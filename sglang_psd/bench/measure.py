"""From the requests' times to figures: latency, and the rate of decoding alone. Pure arithmetic."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from typing import Any

from sglang_psd.bench.client import RequestTimes

Span = tuple[float, float]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between the closest ranks, as numpy's default; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def client_figures(requests: Sequence[RequestTimes], n: int) -> dict[str, Any]:
    """What one measurement showed to its client.

    Parameters
    ----------
    requests : sequence of RequestTimes
    n : int
        Requests in flight of a closed loop; 0 for open arrivals.

    Returns
    -------
    dict
        Names carry units. ``tok_s`` counts all output tokens over the whole time, prefill included; ``decode_tok_s``
        is the rate while exactly ``n`` requests were past their first token and none was being prefilled (None where
        that never lasted, or for open arrivals); ``mean_round_ms`` the time per round that this and the accept length
        amount to, a pair of rounds where two slots take turns.
    """
    done = [request for request in requests if not request.error]
    figures: dict[str, Any] = {"completed": len(done), "failed": len(requests) - len(done)}
    if not done:
        return figures
    begin = min(request.start_s for request in done)
    end = max(request.start_s + request.latency_s for request in done)
    tokens = sum(request.output_len for request in done)
    tpots = [(r.latency_s - r.ttft_s) / (r.output_len - 1) for r in done if r.output_len > 1]
    rate, seconds = decode_rate(done, n) if n else (None, 0.0)
    figures |= {
        "duration_s": round(end - begin, 4),
        "output_tokens": tokens,
        "tok_s": round(tokens / (end - begin), 2),
        "decode_tok_s": rate and round(rate, 2),
        "decode_window_s": round(seconds, 4),
        "accept_length": accept_length(done),
    }
    if rate and figures["accept_length"]:
        figures["mean_round_ms"] = round(1e3 * n * figures["accept_length"] / rate, 4)
    for name, values in (
        ("ttft", [r.ttft_s for r in done]),
        ("tpot", tpots),
        ("itl", [g for r in done for g in r.gaps]),
    ):
        for percent in (50, 99):
            value = percentile(values, percent)
            figures[f"{name}_p{percent}_ms"] = None if value is None else round(value * 1e3, 4)
    return figures


def accept_length(requests: Sequence[RequestTimes]) -> float | None:
    """Tokens per verify over all requests, the prefills' own tokens left out.

    SGLang's figure of a request counts that token: its tokens over its verifies.
    """
    counted = [(r.output_len, r.accept_length) for r in requests if r.accept_length > 0]
    if not counted:
        return None
    return round(sum(tokens - 1 for tokens, _ in counted) / sum(tokens / length for tokens, length in counted), 4)


def decode_rate(requests: Sequence[RequestTimes], n: int) -> tuple[float | None, float]:
    """Tokens per second while ``n`` requests decode and none is prefilled; and how long that lasted."""
    windows = decode_windows(requests, n)
    seconds = sum(end - start for start, end in windows)
    if not seconds:
        return None, 0.0
    times = sorted(moment for request in requests for moment in token_times(request))
    tokens = sum(bisect.bisect_right(times, end) - bisect.bisect_right(times, start) for start, end in windows)
    return tokens / seconds, seconds


def token_times(request: RequestTimes) -> list[float]:
    """When each token came."""
    moment = request.start_s + request.ttft_s
    times = [moment]
    for gap in request.gaps:
        moment += gap
        times.append(moment)
    return times


def decode_windows(requests: Sequence[RequestTimes], n: int) -> list[Span]:
    """Spans in which exactly ``n`` requests are past their first token and no other one waits for its own."""
    events: list[tuple[float, int, int]] = []  # moment, change of prefilling, change of decoding
    for request in requests:
        first, last = request.start_s + request.ttft_s, request.start_s + request.latency_s
        events += [(request.start_s, 1, 0), (first, -1, 1), (last, 0, -1)]
    events.sort()
    windows: list[Span] = []
    prefilling = decoding = 0
    for (moment, prefill, decode), following in zip(events, [*events[1:], None]):
        prefilling, decoding = prefilling + prefill, decoding + decode
        if following is not None and not prefilling and decoding == n and following[0] > moment:
            windows.append((moment, following[0]))
    return windows


def spread(values: Sequence[float | None]) -> tuple[float, float, float] | None:
    """Median, least and greatest of what was measured; None of nothing."""
    known = [value for value in values if value is not None]
    return (statistics.median(known), min(known), max(known)) if known else None
