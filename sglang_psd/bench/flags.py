"""The flags of ``sglang-psd bench``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_psd.bench.options import PROTOCOLS


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]

    parse.__name__ = f"comma-separated {kind.__name__} list"
    return parse


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of ``sglang-psd bench`` beside target, draft and what is passed on to servers."""
    whole, number = _list_of(int), _list_of(float)
    grid = parser.add_argument_group("the grid (lists are comma-separated)")
    grid.add_argument(
        "--arms",
        type=_list_of(str),
        default=[],
        metavar="LIST",
        help="plain, standalone, replicas, replicas-standalone, sequential, parallel; with an EAGLE-3 head as --draft "
        "also eagle3, replicas-eagle3 (default: what this machine can serve, no replicas, a draft model)",
    )
    grid.add_argument("--num-steps", type=whole, default=[3], metavar="LIST", help="drafts per round, k (default 3)")
    grid.add_argument(
        "--concurrency", "-N", type=whole, default=[8], metavar="LIST", help="requests in flight (default 8)"
    )
    grid.add_argument(
        "--input-len", type=whole, default=[128], metavar="LIST", help="prompt tokens of random-ids (default 128)"
    )
    grid.add_argument("--output-len", type=whole, default=[64], metavar="LIST", help="tokens per answer (default 64)")
    grid.add_argument(
        "--rate", type=number, default=[], metavar="LIST", help="Poisson arrivals per second, beside the closed loop"
    )
    grid.add_argument("--rate-seconds", type=float, default=10.0, help="how long they go on (default 10)")
    grid.add_argument(
        "--protocol",
        type=_list_of(str),
        default=["fair"],
        metavar="LIST",
        help=f"{', '.join(PROTOCOLS)}: reference "
        "is eager, with 2N requests in flight for parallel against N for the others (default fair)",
    )
    how = parser.add_argument_group("how it is measured")
    how.add_argument("--batches", type=int, default=3, help="measurements of a cell per server start (default 3)")
    how.add_argument("--repeats", type=int, default=1, help="rounds over all arms, each with new servers (default 1)")
    how.add_argument("--waves", type=int, default=1, help="requests per place in flight in one measurement (default 1)")
    how.add_argument(
        "--dataset",
        default="",
        help="random-ids, prompts (the package's), or a JSONL file in bench_serving's "
        "custom format (default: prompts; random-ids with --load-format dummy)",
    )
    how.add_argument("--temperature", type=float, default=0.0, help="sampling temperature (default 0)")
    how.add_argument(
        "--simulate", type=number, default=[], metavar="LIST", help="simulated accept length for each k of --num-steps"
    )
    how.add_argument("--no-trace", dest="trace", action="store_false", help="no step trace, hence no round times")
    how.add_argument(
        "--time-budget", type=float, default=0.0, metavar="SECONDS", help="stop after the cell that exceeds it"
    )
    how.add_argument(
        "--cell-timeout", type=float, default=300.0, metavar="SECONDS", help="longest measurement (default 300)"
    )
    how.add_argument(
        "--start-timeout", type=float, default=600.0, metavar="SECONDS", help="longest server start (default 600)"
    )
    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, help="result file; a run goes on from what it holds")
    files.add_argument("--fresh", action="store_true", help="start the result file anew")
    files.add_argument("--retry-failed", action="store_true", help="measure cells again that failed")
    files.add_argument("--logs", type=Path, help="folder of server logs and traces (default: a temporary one)")
    files.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the figures there (needs the extra [bench])")
    files.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="Perfetto trace of the last parallel cell, and a picture beside it",
    )
    files.add_argument(
        "--trace-file", type=Path, metavar="FILE", help="draw --timeline from this step trace; no server is started"
    )
    files.add_argument(
        "--report", type=Path, metavar="FILE", help="write the map of winners from result files; no server is started"
    )
    files.add_argument(
        "--results",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="result file of --report and --plots; repeatable (default: results/bench*.json beside the report)",
    )
