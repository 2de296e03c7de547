"""The pictures; matplotlib comes with the extra ``[bench]``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_psd.bench.map import BASELINES, crossover, gains, series_of
from sglang_psd.bench.rounds import Line, target_span
from sglang_psd.errors import PSDConfigError

COLOURS = {
    "plain": "#7f7f7f",
    "replicas": "#bcbd22",
    "standalone": "#1f77b4",
    "replicas-standalone": "#17becf",
    "sequential": "#2ca02c",
    "parallel": "#d62728",
}


def require_matplotlib() -> None:
    """Refuse before anything is measured.

    Raises
    ------
    PSDConfigError
        matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PSDConfigError(
            "--plots and --timeline draw with matplotlib; install it with pip install 'sglang-psd[bench]'."
        )


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def draw_plots(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Throughput against speed per user, and gains against requests in flight; one pair per draft, k and lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for group, series in series_of(results).items():
        written.append(_draw_throughput(group, series, folder))
        written.append(_draw_gains(group, series, folder))
    return written


def _draw_throughput(group: Any, series: dict[str, list[Any]], folder: Path) -> Path:
    figure, axes = _axes(group.title, "tok/s per user (decoding)", "tok/s per GPU (decoding)")
    for arm, points in series.items():
        axes.plot(
            [point.per_user for point in points],
            [point.per_gpu for point in points],
            marker="o",
            label=arm,
            color=COLOURS.get(arm),
        )
        for point in points:
            axes.annotate(
                str(point.n), (point.per_user, point.per_gpu), textcoords="offset points", xytext=(4, 4), fontsize=7
            )
    axes.legend()
    path = folder / f"{group.slug}-throughput.svg"
    figure.savefig(path)
    return path


def _draw_gains(group: Any, series: dict[str, list[Any]], folder: Path) -> Path:
    figure, axes = _axes(group.title, "requests in flight", "gain in tok/s per GPU (decoding)")
    axes.axhline(1.0, color="black", linewidth=0.8)
    for arm in series:
        if arm in BASELINES:
            continue
        for base, style in (("plain", "-"), ("standalone", "--")):
            points = gains(series, arm, base)
            if not points:
                continue
            axes.plot(*zip(*points), style, marker="o", label=f"{arm} over {base}", color=COLOURS.get(arm))
            for place in crossover(points):
                axes.plot([place], [1.0], marker="x", markersize=10, color="black")
                axes.annotate(f"{place:.0f}", (place, 1.0), textcoords="offset points", xytext=(4, 6))
    sizes = sorted({point.n for points in series.values() for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, map(str, sizes))
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    path = folder / f"{group.slug}-gain.svg"
    figure.savefig(path)
    return path


def draw_rounds(lines: Sequence[Line], window: tuple[int, int], path: Path, *, title: str) -> None:
    """Target and drafter over one pair of rounds, to scale."""
    figure, axes = _axes(title, "ms", "")
    figure.set_size_inches(10, 2.6)
    begin, end = window
    for line in lines:
        on_target = line["type"] == "Step"
        start, stop = target_span(line) if on_target else (line["start_us"], line["end_us"])
        if stop < begin or start > end:
            continue
        if on_target and "verify_start_us" in line:
            label, colour = f"verify {'AB'[line['slot']]}", ("#4c72b0", "#dd8452")[line["slot"]]
        else:
            label, colour = ("prefill", "#8c8c8c") if on_target else ("draft", "#55a868")
        row = 1 if on_target else 0
        axes.broken_barh(
            [((start - begin) / 1e3, (stop - start) / 1e3)], (row - 0.35, 0.7), color=colour, edgecolor="white"
        )
        left, right = max(start, begin), min(stop, end)
        axes.text(
            ((left + right) / 2 - begin) / 1e3,
            row,
            f"{label}\n{(stop - start) / 1e3:.2f}",
            ha="center",
            va="center",
            fontsize=7,
            clip_on=True,
        )
    axes.set(yticks=[0, 1], yticklabels=["drafter", "target"], xlim=(0, (end - begin) / 1e3), ylim=(-0.6, 1.6))
    figure.savefig(path)
