"""``sglang-psd bench``: SGLang's own ``bench_serving`` against a plain, a sequential and a parallel server.

Same machine, same prompts, same concurrency, one server after the other. A first look, not a study: one run per arm.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_psd.demo.run import MODES, START_TIMEOUT_S, mode_flags
from sglang_psd.resources import TINY_DRAFT, TINY_TARGET, load_prompts
from sglang_psd.server_process import ServerProcess

COLUMNS = (
    ("output_throughput", "tok/s"),
    ("median_ttft_ms", "TTFT p50 ms"),
    ("p99_ttft_ms", "TTFT p99 ms"),
    ("median_tpot_ms", "TPOT p50 ms"),
    ("p99_tpot_ms", "TPOT p99 ms"),
    ("accept_length", "accept length"),
    ("completed", "completed"),
)


@dataclass
class BenchOptions:
    """What ``sglang-psd bench`` was asked for.

    Attributes
    ----------
    target, draft : str
    num_steps, concurrency, num_prompts, output_len : int
        Drafts per round; requests in flight; requests in all; tokens per answer.
    extra : list of str
        Flags passed on to every server.
    out : Path or None
        File for the figures as JSON.
    """

    target: str = str(TINY_TARGET)
    draft: str = str(TINY_DRAFT)
    num_steps: int = 3
    concurrency: int = 8
    num_prompts: int = 48
    output_len: int = 64
    extra: list[str] = field(default_factory=list)
    out: Path | None = None


def write_dataset(path: Path, count: int) -> None:
    """Write the embedded prompts as the custom JSONL that ``bench_serving`` reads."""
    prompts = load_prompts(count)
    with open(path, "w", encoding="utf-8") as file:
        for i in range(count):
            turns = [
                {"role": "user", "content": prompts[i % len(prompts)]},
                {"role": "assistant", "content": "The length is set by a flag."},
            ]
            file.write(json.dumps({"conversations": turns}) + "\n")


def arm_flags(options: BenchOptions, mode: str) -> list[str]:
    """Server flags of one arm."""
    flags = ["--model-path", options.target, "--random-seed", "1"]
    return flags + mode_flags(options, mode) + options.extra


def bench_command(options: BenchOptions, url: str, dataset: Path, result: Path) -> list[str]:
    """``bench_serving`` against one server."""
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", url]
    command += ["--dataset-name", "custom", "--dataset-path", str(dataset), "--model", options.target]
    command += ["--num-prompts", str(options.num_prompts), "--max-concurrency", str(options.concurrency)]
    command += ["--sharegpt-output-len", str(options.output_len), "--output-file", str(result)]
    return command


def run_bench(options: BenchOptions) -> int:
    """Run all arms, print the table, write the JSON; 0 when every request of every arm completed."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="sglang-psd-bench-") as name:
        folder = Path(name)
        write_dataset(folder / "prompts.jsonl", options.num_prompts)
        for mode in MODES:
            with ServerProcess(arm_flags(options, mode), folder / f"{mode}.log") as server:
                with console.status(f"{mode}: starting the server …"):
                    server.wait_ready(START_TIMEOUT_S)
                command = bench_command(options, server.url, folder / "prompts.jsonl", folder / f"{mode}.jsonl")
                subprocess.run(command, check=True)
            measured = json.loads((folder / f"{mode}.jsonl").read_text().splitlines()[-1])
            figures[mode] = {key: measured.get(key) for key, _ in COLUMNS}
    console.print(_table(options, figures))
    summary = {"concurrency": options.concurrency, "num_steps": options.num_steps, "arms": figures}
    if options.out is not None:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    return 0 if all(arm["completed"] == options.num_prompts for arm in figures.values()) else 1


def _table(options: BenchOptions, figures: dict[str, dict[str, Any]]) -> Table:
    title = f"{options.concurrency} requests in flight, {options.num_steps} drafts a round, one run per arm"
    table = Table(title=title, title_justify="left")
    table.add_column("arm")
    for _, header in COLUMNS:
        table.add_column(header, justify="right")
    for mode, arm in figures.items():
        cells = ["–" if arm[key] is None else f"{arm[key]:.2f}".rstrip("0").rstrip(".") for key, _ in COLUMNS]
        table.add_row(mode, *cells)
    return table
