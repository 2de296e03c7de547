"""``sglang-psd``: what the package offers besides the flags of ``sglang serve``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from sglang_psd import __version__
from sglang_psd.resources import TINY_DRAFT, TINY_TARGET


def build_parser() -> argparse.ArgumentParser:
    """The command line; sub-commands import what they need when they run."""
    parser = argparse.ArgumentParser(prog="sglang-psd", description=__doc__)
    parser.add_argument("--version", action="version", version=f"sglang-psd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="serve the embedded model pair plain, sequential and parallel, and compare")
    _add_pair_flags(demo)
    demo.add_argument("--requests", type=int, default=8, help="concurrent chats (default 8)")
    demo.add_argument("--max-tokens", type=int, default=128, help="longest answer in tokens (default 128)")
    demo.add_argument("--out", type=Path, help="folder for logs and traces (default: a temporary one)")
    bench = commands.add_parser("bench", help="run SGLang's bench_serving against each mode")
    _add_pair_flags(bench)
    bench.add_argument("--concurrency", type=int, default=8, help="requests in flight (default 8)")
    bench.add_argument("--num-prompts", type=int, default=48, help="requests per arm (default 48)")
    bench.add_argument("--output-len", type=int, default=64, help="tokens per answer (default 64)")
    bench.add_argument("--out", type=Path, help="write the figures there as JSON")
    check = commands.add_parser("check", help="hold the hook ledger against the installed SGLang")
    check.add_argument("--verbose", action="store_true", help="print every entry, not only misfits")
    check.add_argument("--fingerprint", action="store_true", help="print the fingerprint of every target and exit")
    return parser


def _add_pair_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", default=str(TINY_TARGET), metavar="PATH", help="model path (default: the embedded tiny target)"
    )
    parser.add_argument(
        "--draft", default=str(TINY_DRAFT), metavar="PATH", help="draft model path (default: the embedded tiny draft)"
    )
    parser.add_argument("--num-steps", type=int, default=3, help="drafts per round (default 3)")
    parser.add_argument("extra", nargs="*", metavar="-- FLAG", help="flags passed on to every server, after --")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    given = vars(build_parser().parse_args(argv))
    command = given.pop("command")
    if command == "check":
        from sglang_psd.ledger import run_check

        return run_check(verbose=given["verbose"], fingerprints_only=given["fingerprint"])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if command == "demo":
        from sglang_psd.demo.run import DemoOptions, run_demo

        return run_demo(DemoOptions(**given))
    from sglang_psd.bench import BenchOptions, run_bench

    return run_bench(BenchOptions(**given))


if __name__ == "__main__":
    sys.exit(main())
