"""``sglang-psd``: what the package offers besides the flags of ``sglang serve``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from sglang_psd import __version__
from sglang_psd.bench.flags import add_flags as add_bench_flags
from sglang_psd.errors import PSDError
from sglang_psd.resources import TINY_DRAFT, TINY_EAGLE3, TINY_TARGET


def build_parser() -> argparse.ArgumentParser:
    """The command line; sub-commands import what they need when they run."""
    parser = argparse.ArgumentParser(prog="sglang-psd", description=__doc__)
    parser.add_argument("--version", action="version", version=f"sglang-psd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="serve the embedded models plain and with PSD in its modes, and compare")
    _add_pair_flags(demo)
    demo.add_argument("--num-steps", type=int, default=3, help="drafts per round (default 3)")
    demo.add_argument("--head", metavar="PATH", help="EAGLE head (default: the embedded one, for the embedded target)")
    demo.add_argument("--requests", type=int, default=8, help="concurrent chats (default 8)")
    demo.add_argument("--max-tokens", type=int, default=128, help="longest answer in tokens (default 128)")
    demo.add_argument("--out", type=Path, help="folder for logs and traces (default: a temporary one)")
    bench = commands.add_parser("bench", help="compare ways to serve with SGLang's bench_serving; draw and report")
    add_bench_flags(bench)
    _add_pair_flags(bench)
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
    parser.add_argument("extra", nargs="*", metavar="-- FLAG", help="flags passed on to every server, after --")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    given = vars(build_parser().parse_args(argv))
    command = given.pop("command")
    if command == "check":
        from sglang_psd.ledger import run_check

        return run_check(verbose=given["verbose"], fingerprints_only=given["fingerprint"])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return _demo(given) if command == "demo" else _bench(given)
    except PSDError as error:
        print(f"sglang-psd {command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None or error.strerror is None:  # no file's fault
            raise
        print(f"sglang-psd {command}: {error.filename} cannot be used ({error.strerror}).", file=sys.stderr)
        return 2


def _demo(given: dict[str, Any]) -> int:
    from sglang_psd.demo.run import DemoOptions, run_demo

    if given["head"] is None and given["target"] == str(TINY_TARGET) and TINY_EAGLE3.is_dir():
        given["head"] = str(TINY_EAGLE3)
    return run_demo(DemoOptions(**given))


def _bench(given: dict[str, Any]) -> int:
    from sglang_psd.bench.command import run_bench
    from sglang_psd.bench.options import BenchOptions

    return run_bench(BenchOptions(**given))


if __name__ == "__main__":
    sys.exit(main())
