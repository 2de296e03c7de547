"""SGLang's ``bench_serving``, called as a function: one import for all cells, and every request's own times."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_psd.bench.grid import Cell
from sglang_psd.bench.options import BenchOptions
from sglang_psd.resources import load_prompts

MODULE = "sglang.benchmark.serving"
BACKEND = "sglang"


@dataclass(frozen=True)
class RequestTimes:
    """What the client saw of one request; seconds of ``time.perf_counter``.

    ``gaps`` are the times between tokens, each chunk's spread evenly over its tokens.
    """

    start_s: float
    ttft_s: float
    latency_s: float
    gaps: list[float]
    output_len: int
    accept_length: float
    error: str


def write_prompts(path: Path, count: int, seed: int) -> None:
    """Write the package's prompts in ``bench_serving``'s custom format, repeated until there are ``count``."""
    prompts = load_prompts(64)
    random.Random(seed).shuffle(prompts)
    with open(path, "w", encoding="utf-8") as file:
        for i in range(count):
            turns = [
                {"role": "user", "content": prompts[i % len(prompts)]},
                {"role": "assistant", "content": "The length is set by a flag."},
            ]
            file.write(json.dumps({"conversations": turns}) + "\n")


def num_requests(cell: Cell, options: BenchOptions) -> int:
    """Requests of one measurement."""
    if cell.rate is not None:
        return max(4, round(cell.rate * options.rate_seconds))
    return cell.n * options.waves


def client_arguments(
    cell: Cell, options: BenchOptions, *, url: str, tokenizer: str, seed: int, warm_up: bool, work: Path
) -> list[str]:
    """Arguments of ``python -m sglang.benchmark.serving`` for one measurement.

    ``warm_up``: send as many requests as will be measured first, as the first measurement of a cell on a server does.
    """
    count = num_requests(cell, options)
    flags = ["--backend", BACKEND, "--base-url", url, "--model", tokenizer, "--num-prompts", str(count)]
    data = options.data
    if data == "random-ids":
        flags += ["--dataset-name", data, "--tokenize-prompt", "--random-range-ratio", "1.0"]
        flags += ["--random-input-len", str(cell.input_len), "--random-output-len", str(cell.output_len)]
    else:
        path = work / "prompts.jsonl" if data == "prompts" else Path(data)
        if data == "prompts":
            write_prompts(path, count, seed)
        flags += ["--dataset-name", "custom", "--dataset-path", str(path)]
        flags += ["--sharegpt-output-len", str(cell.output_len)]
    if cell.rate is None:
        flags += ["--max-concurrency", str(cell.n)]
    else:
        flags += ["--request-rate", str(cell.rate)]
    flags += ["--warmup-requests", str(min(count, 256) if warm_up else 0), "--flush-cache"]
    flags += ["--temperature", str(options.temperature), "--seed", str(seed), "--disable-tqdm"]
    return [*flags, "--ready-check-timeout-sec", "0", "--output-file", str(work / "bench_serving.jsonl")]


class ServingClient:
    """Runs ``bench_serving`` in this process and keeps what it says in a log.

    Its function is the stock one. The request function of the backend is wrapped to keep each request's times, of which
    the stock result leaves out the start; tokenizers are kept between measurements.
    """

    def __init__(self, log_path: Path):
        with open(log_path, "a", encoding="utf-8") as log, contextlib.redirect_stderr(log):
            from sglang.benchmark import serving

        self._serving: Any = serving
        self._log_path = log_path
        # Both read the tokenizer anew for every measurement, seconds with a large vocabulary.
        for name in ("get_tokenizer", "check_chat_template"):
            setattr(serving, name, functools.lru_cache(getattr(serving, name)))

    def run(self, arguments: list[str]) -> tuple[dict[str, Any], list[RequestTimes]]:
        """One measurement: ``bench_serving``'s result, and the measured requests without the warm-up's."""
        with (
            open(self._log_path, "a", encoding="utf-8") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
        ):
            parsed = self._parse(arguments)
            with self._collecting() as outputs:
                result = self._serving.run_benchmark(parsed)
        return result, [_times(output) for output in outputs[parsed.warmup_requests :]]

    def _parse(self, arguments: list[str]) -> Any:
        """The namespace that the command line tool would run with."""
        parsed: list[Any] = []
        stock, argv = self._serving.run_benchmark, sys.argv
        self._serving.run_benchmark, sys.argv = parsed.append, [MODULE, *arguments]
        try:
            self._serving.cli_main()
        finally:
            self._serving.run_benchmark, sys.argv = stock, argv
        return parsed[0]

    @contextlib.contextmanager
    def _collecting(self) -> Iterator[list[Any]]:
        outputs: list[Any] = []
        functions = self._serving.ASYNC_REQUEST_FUNCS
        stock = functions[BACKEND]

        async def collect(*args: Any, **kwargs: Any) -> Any:
            output = await stock(*args, **kwargs)
            outputs.append(output)
            return output

        functions[BACKEND] = collect
        try:
            yield outputs
        finally:
            functions[BACKEND] = stock


def _times(output: Any) -> RequestTimes:
    return RequestTimes(
        start_s=output.start_time,
        ttft_s=output.ttft,
        latency_s=output.latency,
        gaps=output.itl,
        output_len=output.output_len if output.success else 0,
        accept_length=output.spec_accept_length,
        error="" if output.success else output.error,
    )
