"""One row per cell: medians over its measurements, with least and greatest where a reader compares."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from sglang_psd.bench.measure import spread

Entry = dict[str, Any]


def figure(entry: Entry, name: str) -> tuple[float, float, float] | None:
    """Median, least, greatest of one figure over a cell's measurements; ``rounds.x`` looks into the round times."""
    group, _, key = name.rpartition(".")
    found = [(m.get(group) or {}) if group else m for m in entry["measurements"]]
    return spread([values.get(key or name) for values in found])


def median(entry: Entry, name: str) -> float | None:
    """Median of one figure over a cell's measurements."""
    found = figure(entry, name)
    return found and found[0]


# Header, name of the figure, decimals, whether least and greatest are shown.
COLUMNS = (
    ("GPUs", "gpus", 0, False),
    ("tok/s", "tok_s", 0, True),
    ("decode tok/s", "decode_tok_s", 0, True),
    ("/GPU", "decode_tok_s_per_gpu", 0, False),
    ("TTFT p50", "ttft_p50_ms", 1, False),
    ("p99", "ttft_p99_ms", 1, False),
    ("TPOT p50", "tpot_p50_ms", 2, True),
    ("p99", "tpot_p99_ms", 2, False),
    ("ITL p99", "itl_p99_ms", 2, False),
    ("a", "accept_length", 2, False),
    ("T_v", "rounds.verify_ms_p50", 2, False),
    ("T_d", "rounds.draft_ms_p50", 2, False),
    ("round", "mean_round_ms", 2, False),
    ("bubble", "rounds.target_bubble", 3, False),
    ("overlap", "rounds.overlap", 2, False),
)


def shown(found: tuple[float, float, float] | None, decimals: int, with_range: bool) -> str:
    """``median (least–greatest)``, or a dash."""
    if found is None:
        return "–"
    middle, least, greatest = (f"{value:.{decimals}f}" for value in found)
    return f"{middle} ({least}–{greatest})" if with_range and least != greatest else middle


def results_table(data: dict[str, Any]) -> Table:
    """The whole result file; times in ms, ``a`` the accept length."""
    count = max((len(entry["measurements"]) for entry in data["cells"].values()), default=0)
    table = Table(title=f"Medians of up to {count} measurements (least–greatest), times in ms", title_justify="left")
    table.add_column("cell", no_wrap=True)
    for header, *_ in COLUMNS:
        table.add_column(header, justify="right")
    for key, entry in data["cells"].items():
        if entry["measurements"]:
            table.add_row(key, *(shown(figure(entry, name), places, both) for _, name, places, both in COLUMNS))
        else:
            reason = entry["errors"][-1]["reason"] if entry["errors"] else "not measured"
            table.add_row(f"{key}: {reason}"[:60], *("–" for _ in COLUMNS))
    return table
