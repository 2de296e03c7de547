"""The demo: a plain server and PSD servers answer the same chats; the greedy texts must be identical.

PSD runs sequentially and in parallel with a draft model, and in parallel with an EAGLE head where there is one.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from sglang_psd.config import MAX_NUM_STEPS
from sglang_psd.cpu.bootstrap import gpu_driver_present
from sglang_psd.demo.chat import ChatAnswer, ChatRun, stream_chats
from sglang_psd.errors import PSDConfigError
from sglang_psd.resources import NUM_PROMPTS, TINY_DRAFT, TINY_TARGET, check_checkpoint, load_prompts
from sglang_psd.server_process import ServerProcess

MODES = ("plain", "sequential", "parallel")
# Parallel mode with the head in place of the draft model.
EAGLE = "eagle"
REFRESH_S = 0.1
START_TIMEOUT_S = 600.0
CAPTION = """\
accept length: tokens per verify and chat. T_v, T_d: time of a verify, of drafting.
overlap: share of the drafting during which the target worked."""


@dataclass
class DemoOptions:
    """What ``sglang-psd demo`` was asked for.

    Attributes
    ----------
    target, draft : str
        Model paths.
    head : str or None
        Path of an EAGLE head for the target; None: no such server.
    num_steps : int
        Drafts per round.
    requests, max_tokens : int
        Concurrent chats; longest answer in tokens.
    extra : list of str
        Flags passed on to every server.
    out : Path or None
        Folder for logs and traces; a temporary one by default.
    """

    target: str = str(TINY_TARGET)
    draft: str = str(TINY_DRAFT)
    head: str | None = None
    num_steps: int = 3
    requests: int = 8
    max_tokens: int = 128
    extra: list[str] = field(default_factory=list)
    out: Path | None = None

    def __post_init__(self) -> None:
        for flag, value, limit in (
            ("--num-steps", self.num_steps, MAX_NUM_STEPS),
            ("--requests", self.requests, NUM_PROMPTS),
            ("--max-tokens", self.max_tokens, None),
        ):
            if value < 1 or (limit is not None and value > limit):
                bounds = "be at least 1" if limit is None else f"lie between 1 and {limit}"
                raise PSDConfigError(f"{flag} must {bounds}, got {value}.")
        check_checkpoint("--target", self.target, "target")
        check_checkpoint("--draft", self.draft, "draft")
        if self.head is not None:
            check_checkpoint("--head", self.head, "head's")


@dataclass
class ModeResult:
    """One server's answers and its figures of ``/server_info``."""

    mode: str
    start_s: float
    run: ChatRun
    psd: dict[str, Any]


def mode_flags(options: Any, mode: str) -> list[str]:
    """What makes a server one of ``MODES``, or ``EAGLE``; ``options`` has ``draft``, ``num_steps``, and ``head``."""
    if mode == "plain":
        return []
    draft, psd_mode = (options.head, "parallel") if mode == EAGLE else (options.draft, mode)
    flags = ["--speculative-algorithm", "PSD", "--speculative-draft-model-path", draft]
    # Its servers live for seconds: no standby is ready before they end, and its imports would take a core from them.
    flags += ["--psd-config", '{"standby": false}']
    return [*flags, "--speculative-num-steps", str(options.num_steps), "--psd-mode", psd_mode]


def server_flags(options: DemoOptions, mode: str, trace: Path) -> list[str]:
    """Command line of one demo server."""
    flags = ["--model-path", options.target, "--random-seed", "1", "--log-level", "info"]
    if gpu_driver_present():
        # Texts can only be compared bit by bit when a token's logits depend neither on its neighbours in the batch nor
        # on whether it was decoded or verified: deterministic kernels, and no CUDA graphs, whose attention plan
        # depends on the captured size.
        flags += ["--attention-backend", "flashinfer", "--enable-deterministic-inference"]
        flags += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
        flags += ["--mem-fraction-static", "0.5"]
    if mode != "plain":
        flags += ["--psd-trace", str(trace)]
    return flags + mode_flags(options, mode) + options.extra


def run_mode(options: DemoOptions, mode: str, folder: Path, console: Console) -> ModeResult:
    """Start one server, let it answer the chats, stop it."""
    trace = folder / f"trace-{mode}.jsonl"
    with ServerProcess(server_flags(options, mode, trace), folder / f"server-{mode}.log") as server:
        start_s = _wait_with_spinner(server, mode, console)
        prompts = load_prompts(options.requests)
        warm_up(server.url, prompts, options.max_tokens)
        before = _psd_figures(server.url)
        run = _stream_live(server, mode, prompts, options.max_tokens, console)
        figures = _psd_figures(server.url) if before is not None else {}
        return ModeResult(mode, start_s, run, figures or {})


def warm_up(url: str, prompts: list[str], max_tokens: int) -> None:
    """Answer each chat alone, then all of them once: first use compiles and fills caches.

    Alone first, because a GPU computes a prompt's KV with other last bits when other prompts share its batch; the timed
    chats then start from cached prompts that are equal in all modes.
    """
    for prompt in prompts:
        stream_chats(url, [prompt], 1, lambda answers: None)
    stream_chats(url, prompts, max_tokens, lambda answers: None)


def _wait_with_spinner(server: ServerProcess, mode: str, console: Console) -> float:
    with console.status(f"[bold]{mode}[/]: starting the server …") as status:
        return server.wait_ready(
            START_TIMEOUT_S, lambda s: status.update(f"[bold]{mode}[/]: starting the server … {s:.0f} s")
        )


def _stream_live(server: ServerProcess, mode: str, prompts: list[str], max_tokens: int, console: Console) -> ChatRun:
    drawn = 0.0
    with Live(console=console, auto_refresh=False, transient=False) as live:

        def show(answers: list[ChatAnswer]) -> None:
            nonlocal drawn
            if time.monotonic() - drawn > REFRESH_S:
                drawn = time.monotonic()
                live.update(_progress_table(mode, answers), refresh=console.is_terminal)

        run = stream_chats(server.url, prompts, max_tokens, show)
        live.update(_progress_table(mode, run.answers), refresh=True)
    console.print()
    return run


def _progress_table(mode: str, answers: list[ChatAnswer]) -> Table:
    table = Table(title=f"{mode}: {len(answers)} chats at once", title_justify="left", expand=True)
    table.add_column("prompt", ratio=2, no_wrap=True)
    table.add_column("answer", ratio=4, no_wrap=True)
    table.add_column("tokens", justify="right", width=7)
    for answer in answers:
        tail = " ".join(answer.text.split())[-160:]
        tokens = str(answer.completion_tokens) if answer.completion_tokens else "…"
        table.add_row(" ".join(answer.prompt.split()), tail, tokens)
    return table


def _psd_figures(url: str) -> dict[str, Any] | None:
    with urllib.request.urlopen(url + "/server_info", timeout=60) as answer:
        states = json.load(answer).get("internal_states") or [{}]
    return states[0].get("psd")


def compare_texts(results: list[ModeResult]) -> list[str]:
    """Say where texts differ from the plain server's; empty when all are identical."""
    plain = results[0].run.texts
    differences = []
    for result in results[1:]:
        for i, (expected, got) in enumerate(zip(plain, result.run.texts)):
            if expected != got:
                at = next((j for j, (a, b) in enumerate(zip(expected, got)) if a != b), min(len(expected), len(got)))
                differences.append(
                    f"{result.mode}, chat {i}: from character {at} {got[at : at + 30]!r} instead of "
                    f"{expected[at : at + 30]!r}"
                )
    return differences


def summary_table(results: list[ModeResult]) -> Table:
    """Tokens, accept length, speed, round times and overlap of each mode."""
    table = Table(title=f"Same chats, greedy, {len(results)} ways", title_justify="left")
    table.caption, table.caption_justify = CAPTION, "left"
    headers = ("mode", "tokens", "accept length", "tok/s", "T_v ms", "T_d ms", "overlap", "start s", "texts")
    for header in headers:
        table.add_column(header, justify="left" if header in ("mode", "texts") else "right")
    for result in results:
        psd = result.psd
        same = result.run.texts == results[0].run.texts
        table.add_row(
            result.mode,
            str(result.run.completion_tokens),
            f"{psd['accept_length']:.2f}" if psd else "1.00",
            f"{result.run.tokens_per_s:.0f}",
            f"{psd['verify_ms']:.2f}" if psd else "–",
            f"{psd['draft_ms']:.2f}" if psd else "–",
            f"{psd['overlap_fraction']:.0%}" if psd else "–",
            f"{result.start_s:.0f}",
            "reference" if result is results[0] else ("identical" if same else "DIFFERENT"),
        )
    return table


def summary_json(results: list[ModeResult], identical: bool) -> dict[str, Any]:
    """The machine-readable last line."""
    parallel = next(result for result in results if result.mode == "parallel")
    modes = {
        result.mode: {
            "completion_tokens": result.run.completion_tokens,
            "tokens_per_s": round(result.run.tokens_per_s, 1),
            "start_s": round(result.start_s, 1),
            **{key: value for key, value in result.psd.items() if key not in ("slot_sizes", "configured_mode", "mode")},
        }
        for result in results
    }
    return {
        "identical": identical,
        "accept_length": parallel.psd.get("accept_length", 0.0),
        "overlap_fraction": parallel.psd.get("overlap_fraction", 0.0),
        "device": "gpu" if gpu_driver_present() else "cpu",
        "modes": modes,
    }


def run_demo(options: DemoOptions) -> int:
    """Run all modes and print the comparison; 0 only if every greedy text is identical."""
    console = Console(stderr=False, width=None if sys.stdout.isatty() else 140)
    folder = options.out or Path(tempfile.mkdtemp(prefix="sglang-psd-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    drafters = f"Draft  {options.draft}\n" + (f"Head   {options.head}\n" if options.head else "")
    console.print(f"Target {options.target}\n{drafters}Logs and traces: {folder}\n")
    modes = (*MODES, EAGLE) if options.head else MODES
    results = [run_mode(options, mode, folder, console) for mode in modes]
    console.print(summary_table(results))
    if not gpu_driver_present():
        console.print(
            "On a CPU both models share the cores: this shows that the modes work and agree, not how fast they are."
        )
    differences = compare_texts(results)
    for line in differences:
        console.print(f"[red]{line}[/]")
    print(json.dumps(summary_json(results, not differences)), flush=True)
    return 1 if differences else 0
