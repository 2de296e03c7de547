"""SGLang's ``bench_serving``, called as a function: one import for all cells, and every request's own times."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import sys
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_psd.bench.grid import Cell
from sglang_psd.bench.options import PROMPTS, RANDOM_IDS, BenchOptions
from sglang_psd.resources import load_prompts

MODULE = "sglang.benchmark.serving"
BACKEND = "sglang"
WARM_UP_TOKENS = 16
# At once, where arrivals are open.
WARM_UP_REQUESTS = 16
FLUSH_TIMEOUT_S = 30


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
    """Arguments of ``python -m sglang.benchmark.serving`` for one measurement, or for the warm-up before the first.

    A warm-up sends other prompts, as many at once as will be measured, and asks for short answers.
    """
    count = min(num_requests(cell, options), cell.n or WARM_UP_REQUESTS) if warm_up else num_requests(cell, options)
    output_len = min(cell.output_len, WARM_UP_TOKENS) if warm_up else cell.output_len
    flags = ["--backend", BACKEND, "--base-url", url, "--model", tokenizer, "--num-prompts", str(count)]
    if options.data == RANDOM_IDS:
        flags += ["--dataset-name", RANDOM_IDS, "--tokenize-prompt", "--random-range-ratio", "1.0"]
        flags += ["--random-input-len", str(cell.input_len), "--random-output-len", str(output_len)]
    else:
        path = work / f"prompts-{seed}.jsonl" if options.data == PROMPTS else Path(options.data)
        if options.data == PROMPTS:
            write_prompts(path, count, seed)
        flags += ["--dataset-name", "custom", "--dataset-path", str(path), "--sharegpt-output-len", str(output_len)]
    if cell.rate is None or warm_up:
        flags += ["--max-concurrency", str(cell.n or count)]
    else:
        flags += ["--request-rate", str(cell.rate)]
    flags += [
        "--warmup-requests",
        "0",
        "--temperature",
        str(options.temperature),
        "--seed",
        str(seed),
        "--disable-tqdm",
    ]
    return [*flags, "--ready-check-timeout-sec", "0", "--output-file", str(work / "bench_serving.jsonl")]


def seed_of(cell: Cell, measurement: int) -> int:
    """Equal for all arms, different for all that is sent to one server; measurement -1 is the warm-up."""
    text = f"{cell.row}/{cell.rate}/{cell.input_len}/{cell.output_len}/{measurement}"
    return zlib.crc32(text.encode()) >> 1


def flush_cache(url: str) -> None:
    """Make the server forget prompts, once it is idle.

    ``bench_serving --flush-cache`` does not wait: a server that still winds up its last batch refuses.
    """
    request = urllib.request.Request(f"{url}/flush_cache?timeout={FLUSH_TIMEOUT_S}", method="POST")
    with urllib.request.urlopen(request, timeout=2 * FLUSH_TIMEOUT_S):
        pass


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
        """One measurement: ``bench_serving``'s result, and the times of its requests."""
        with (
            open(self._log_path, "a", encoding="utf-8") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
        ):
            parsed = self._parse(arguments)
            with self._collecting() as outputs:
                result = self._serving.run_benchmark(parsed)
        return result, [_times(output) for output in outputs]

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
