"""Runs the plan: one server at a time, every cell on it, the result file written after each."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import threading
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_psd.bench.arms import find_arms, occupied, server_flags, tp_size_of
from sglang_psd.bench.client import MODULE, RequestTimes, ServingClient, client_arguments, flush_cache, seed_of
from sglang_psd.bench.environment import environment, gpu_names
from sglang_psd.bench.grid import Cell, ServerPlan, measured_sizes, plan
from sglang_psd.bench.measure import client_figures
from sglang_psd.bench.options import RANDOM_IDS, BenchOptions
from sglang_psd.bench.results import ResultFile
from sglang_psd.bench.rounds import read_trace, round_figures
from sglang_psd.bench.shapes import with_tokenizer
from sglang_psd.resources import PACKAGE
from sglang_psd.server_process import ServerProcess, ServerStartError

# How long a server that failed a request may take to answer again before it counts as lost.
RECOVERY_S = 20.0
SIMULATE = "SGLANG_SIMULATE_ACC_LEN"
TOKEN_MODE = "SGLANG_SIMULATE_ACC_TOKEN_MODE"


class OutOfTime(Exception):
    """The time budget is spent; what was measured is saved."""


class Runner:
    """One ``sglang-psd bench``.

    Parameters
    ----------
    options : BenchOptions
    console : Console
        Must write to a file of its own: ``bench_serving``'s output is redirected while it runs.
    command : str
        What the user typed, for the result file.
    """

    def __init__(self, options: BenchOptions, console: Console, command: str):
        self.options = options
        self.console = console
        self.work = options.logs or Path(tempfile.mkdtemp(prefix="sglang-psd-bench-"))
        self.work.mkdir(parents=True, exist_ok=True)
        self.gpus = len(gpu_names())
        self.tp_size = tp_size_of(options.extra)
        self.arms = find_arms(options.arms or self._default_arms(), gpus=self.gpus, tp_size=self.tp_size)
        self.target = with_tokenizer(options.target, self.work)
        self.draft = with_tokenizer(options.draft, self.work)
        settings = self._settings(command)
        path = options.out or self.work / "bench.json"
        self.results = ResultFile(path, settings, environment(), fresh=options.fresh)
        if options.retry_failed:
            self.results.forget_errors()
        self.last_trace: tuple[Cell, list[dict[str, Any]]] | None = None
        self._client: ServingClient | None = None
        self._begin = time.monotonic()
        self._last_start_s = 0.0

    def _default_arms(self) -> list[str]:
        return ["plain", *(["standalone"] if self.gpus else []), "sequential", "parallel"]

    def _settings(self, command: str) -> dict[str, Any]:
        options = self.options
        return {
            "command": self._portable(command),
            "target": self._portable(options.target),
            "draft": self._portable(options.draft),
            "dataset": options.data,
            "temperature": options.temperature,
            "waves": options.waves,
            "batches": options.batches,
            "repeats": options.repeats,
            "extra": options.extra,
            "simulated": {str(k): options.simulated(k) for k in options.num_steps},
            "environment_accept_length": os.environ.get(SIMULATE),
            "dummy_weights": options.dummy_weights,
        }

    # --- the plan -------------------------------------------------------------------------------

    def run(self) -> bool:
        """Measure what is missing; returns whether every cell of the plan is measured."""
        plans = list(plan(self.options, self.arms))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as bar:
            task = bar.add_task("cells", total=sum(len(server.cells) for server in plans))
            try:
                for server in plans:
                    todo = [cell for cell in server.cells if self._missing(cell, server.repeat)]
                    bar.advance(task, len(server.cells) - len(todo))
                    while todo:
                        self._check_time(self._last_start_s)
                        bar.update(task, description=f"{server.key}: starting")
                        todo = self._serve(server, todo, lambda cell: self._progressed(bar, task, cell))
            except OutOfTime:
                self.console.print("The time budget is spent; the same command goes on from here.")
            except KeyboardInterrupt:
                self.console.print("Interrupted; the same command goes on from here.")
        return all(not self._missing(cell, server.repeat, failed=True) for server in plans for cell in server.cells)

    def _progressed(self, bar: Progress, task: Any, cell: Cell) -> None:
        bar.update(task, description=cell.key, advance=1)

    def _missing(self, cell: Cell, repeat: int, failed: bool = False) -> bool:
        """Whether the cell is still to be measured; ``failed``: also when it was tried in vain."""
        if self.results.failed(cell.key, repeat):
            return failed
        return self.results.measured(cell.key, repeat) < self.options.batches

    def _check_time(self, needed_s: float = 0.0) -> None:
        budget = self.options.time_budget
        if budget and time.monotonic() - self._begin + needed_s >= budget:
            raise OutOfTime

    # --- one server -----------------------------------------------------------------------------

    def _serve(self, server: ServerPlan, todo: list[Cell], done: Any) -> list[Cell]:
        """Measure ``todo`` on one server start; returns the cells that its death left unmeasured."""
        trace = self.work / f"{server.key}.trace.jsonl"
        flags = self._flags(server, trace)
        simulated = self.options.simulated(server.k)
        # Emitting the drafts keeps a drafter's KV valid, as real acceptance does; stock's other mode emits one token
        # over and over, which no drafter proposed.
        variables = {} if simulated is None else {SIMULATE: str(simulated), TOKEN_MODE: "real-draft-token"}
        started = time.monotonic()
        with ServerProcess(flags, self.work / f"{server.key}.log", environment=variables) as process:
            if self._client is None:
                # A long import, done while the server loads.
                self._client = ServingClient(self.work / "bench_serving.log")
            try:
                process.wait_ready(self.options.start_timeout)
            except ServerStartError as error:
                said = self._portable(process.cause())[:200]
                for cell in todo:
                    self._note_error(cell, server.repeat, f"the server did not start: {said}", str(error))
                    done(cell)
                return []
            self._last_start_s = time.monotonic() - started
            self._note_server(server, process, flags, variables)
            for index, cell in enumerate(todo):
                self._check_time()
                if not self._measure(cell, server, process, trace):
                    done(cell)
                    return todo[index + 1 :]
                done(cell)
        return []

    def _flags(self, server: ServerPlan, trace: Path) -> list[str]:
        flags = server_flags(
            server.arm,
            target=self.target,
            draft=self.draft,
            k=server.k,
            gpus=self.gpus,
            tp_size=self.tp_size,
            eager=server.protocol == "reference",
            sizes=measured_sizes(self.options, self.arms, server.protocol),
        )
        if server.arm.psd and self.options.trace:
            flags += ["--psd-trace", str(trace)]
        return flags + self.options.extra

    def _note_server(self, server: ServerPlan, process: ServerProcess, flags: list[str], variables: dict) -> None:
        assigned = "".join(f"{name}={value} " for name, value in variables.items())
        self.results.data["servers"][server.key] = {
            "arm": server.arm.name,
            "k": server.k,
            "protocol": server.protocol,
            "repeat": server.repeat,
            "command": self._portable(assigned + shlex.join(["python", "-m", "sglang.launch_server", *flags])),
            "start_s": round(self._last_start_s, 1),
            **occupied(server_info(process.url)),
        }
        self.results.save()
        self.console.print(f"{server.key}: ready after {self._last_start_s:.0f} s")

    def _portable(self, text: str) -> str:
        """Without this machine's paths: what a reader elsewhere can use."""
        sglang = find_spec("sglang")
        installed = (sglang and sglang.submodule_search_locations) or []
        text = text.replace(str(self.work), "$LOGS")
        for folder in (PACKAGE.parent, *(Path(package).parent for package in installed), sys.prefix):
            text = text.replace(f"{folder}/", "")
        return text

    # --- one cell -------------------------------------------------------------------------------

    def _measure(self, cell: Cell, server: ServerPlan, process: ServerProcess, trace: Path) -> bool:
        """Fill the cell; False when its server is gone."""
        assert self._client is not None
        first = self.results.measured(cell.key, server.repeat)
        for batch in range(first, self.options.batches):
            measurement = server.repeat * self.options.batches + batch
            arguments = self._arguments(cell, process, measurement)
            watchdog = threading.Timer(self.options.cell_timeout, process.stop)
            watchdog.start()
            try:
                if batch == first:
                    flush_cache(process.url)
                    self._client.run(self._arguments(cell, process, -1))
                if self.options.data != RANDOM_IDS:
                    # The same prompts come again; random ones do not, and a flush empties the allocator's cache too.
                    flush_cache(process.url)
                offset = trace.stat().st_size if trace.exists() else 0
                result, requests = self._client.run(arguments)
            except (Exception, SystemExit) as error:
                return self._failed(cell, server, process, f"{type(error).__name__}: {error}")
            finally:
                watchdog.cancel()
            lines = read_trace(trace, offset)
            failed = [request.error for request in requests if request.error]
            if failed:
                return self._failed(cell, server, process, f"{len(failed)} requests failed: {failed[0][-300:]}")
            figures = self._figures(cell, server, result, requests, lines)
            figures["command"] = self._portable(shlex.join(["python", "-m", MODULE, *arguments]))
            self.results.entry(cell.to_json())["measurements"].append(figures)
            self.results.save()
            if lines and (server.arm.name == "parallel" or self.last_trace is None):
                self.last_trace = (cell, lines)
        self._print_cell(cell)
        return True

    def _arguments(self, cell: Cell, process: ServerProcess, measurement: int) -> list[str]:
        return client_arguments(
            cell,
            self.options,
            url=process.url,
            tokenizer=self.target,
            seed=seed_of(cell, measurement),
            warm_up=measurement < 0,
            work=self.work,
        )

    def _failed(self, cell: Cell, server: ServerPlan, process: ServerProcess, reason: str) -> bool:
        """Record the failure; returns whether the server can go on. A dying one takes seconds to end."""
        alive = process.recovers(RECOVERY_S)
        self._note_error(cell, server.repeat, reason if alive else f"the server ended ({reason})", process.log_tail())
        return alive

    def _figures(
        self, cell: Cell, server: ServerPlan, result: dict, requests: list[RequestTimes], lines: list
    ) -> dict[str, Any]:
        places = self.results.data["servers"][server.key]
        figures = client_figures(requests, cell.n)
        return {
            "repeat": server.repeat,
            **figures,
            "tok_s_per_gpu": round(figures.get("tok_s", 0.0) / places["gpus"], 2),
            "decode_tok_s_per_gpu": figures.get("decode_tok_s") and round(figures["decode_tok_s"] / places["gpus"], 2),
            "gpus": places["gpus"],
            "bench_serving_tok_s": round(result["output_throughput"], 2),
            "bench_serving_accept_length": result.get("accept_length"),
            "rounds": round_figures(lines),
        }

    def _note_error(self, cell: Cell, repeat: int, reason: str, log_tail: str) -> None:
        entry = self.results.entry(cell.to_json())
        entry["errors"].append({"repeat": repeat, "reason": reason, "log": self._portable(log_tail).splitlines()[-15:]})
        self.results.save()
        self.console.print(f"[red]{cell.key}: {reason}[/]; logs in {self.work}", highlight=False)

    def _print_cell(self, cell: Cell) -> None:
        last = self.results.entry(cell.to_json())["measurements"][-1]
        decode = last.get("decode_tok_s")
        self.console.print(
            f"{cell.key}: {last['tok_s']:.0f} tok/s, decoding alone {'–' if decode is None else f'{decode:.0f}'}, "
            f"TPOT p50 {last['tpot_p50_ms'] or 0:.2f} ms",
            highlight=False,
        )


def server_info(url: str) -> dict[str, Any]:
    """``/server_info`` as a dictionary."""
    with urllib.request.urlopen(url + "/server_info", timeout=60) as answer:
        return json.load(answer)
