"""What ``sglang-psd bench`` does: measure, draw, or report."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from rich.console import Console

from sglang_psd.bench.options import BenchOptions
from sglang_psd.bench.plots import draw_plots, require_matplotlib
from sglang_psd.bench.report import report
from sglang_psd.bench.results import load_results
from sglang_psd.bench.rounds import read_trace
from sglang_psd.bench.runner import Runner
from sglang_psd.bench.table import results_table
from sglang_psd.bench.timeline import write_timeline
from sglang_psd.errors import PSDConfigError


def run_bench(options: BenchOptions) -> int:
    """Run, or only draw and report; 0 when every cell of the plan was measured."""
    # A file of its own: bench_serving's output is redirected while it runs.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200)
    if options.report is not None:
        return _write_report(options, console)
    if options.trace_file is not None:
        return _draw_trace(options, console)
    if options.results:
        return _draw_results(options, console)
    return _measure(options, console)


def _measure(options: BenchOptions, console: Console) -> int:
    if options.plots is not None or options.timeline is not None:
        require_matplotlib()
    runner = Runner(options, console, shlex.join(["sglang-psd", *sys.argv[1:]]))
    console.print(f"Logs and traces: {runner.work}\nResults: {runner.results.path}", highlight=False)
    complete = runner.run()
    console.print(results_table(runner.results.data))
    if not runner.gpus:
        console.print("On a CPU both models share the cores: this shows that the arms work, not how fast they are.")
    if options.plots is not None:
        _print_written(console, draw_plots([runner.results.data], options.plots))
    if options.timeline is not None:
        if runner.last_trace is None:
            console.print("No timeline: no PSD server was measured in this run.")
        else:
            cell, lines = runner.last_trace
            _print_written(console, write_timeline(lines, options.timeline, title=cell.key))
    return 0 if complete else 1


def _write_report(options: BenchOptions, console: Console) -> int:
    assert options.report is not None
    paths = options.results or sorted((options.report.parent / "results").glob("bench*.json"))
    if not paths:
        raise PSDConfigError(
            f"--report found no results/bench*.json beside {options.report}; name result files with --results."
        )
    found = {path.name: load_results(path) for path in paths}
    if options.plots is not None:
        require_matplotlib()
        _print_written(console, draw_plots(list(found.values()), options.plots))
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(report(found), encoding="utf-8")
    _print_written(console, [options.report])
    return 0


def _draw_results(options: BenchOptions, console: Console) -> int:
    found = [load_results(path) for path in options.results]
    for data in found:
        console.print(results_table(data))
    if options.plots is not None:
        require_matplotlib()
        _print_written(console, draw_plots(found, options.plots))
    return 0


def _draw_trace(options: BenchOptions, console: Console) -> int:
    assert options.trace_file is not None and options.timeline is not None
    require_matplotlib()
    try:
        lines = read_trace(options.trace_file)
        written = write_timeline(lines, options.timeline, title=options.trace_file.name) if lines else []
    except (ValueError, KeyError, TypeError):  # not JSON, or other JSON
        written = []
    if not written:
        raise PSDConfigError(f"--trace-file {options.trace_file} holds no step trace (see --psd-trace).")
    _print_written(console, written)
    return 0


def _print_written(console: Console, paths: list[Path]) -> None:
    for path in paths:
        console.print(f"Wrote {path}", highlight=False)
