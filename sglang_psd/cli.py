"""``sglang-psd``: what the package offers besides the flags of ``sglang serve``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from sglang_psd import __version__


def build_parser() -> argparse.ArgumentParser:
    """The command line; sub-commands import what they need when they run."""
    parser = argparse.ArgumentParser(prog="sglang-psd", description=__doc__)
    parser.add_argument("--version", action="version", version=f"sglang-psd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="serve the embedded model pair plain, sequential and parallel, and compare")
    demo.add_argument("--target", help="model path (default: the embedded tiny target)")
    demo.add_argument("--draft", help="draft model path (default: the embedded tiny draft)")
    demo.add_argument("--num-steps", type=int, default=3, help="drafts per round (default 3)")
    demo.add_argument("--requests", type=int, default=8, help="concurrent chats (default 8)")
    demo.add_argument("--max-tokens", type=int, default=128, help="longest answer in tokens (default 128)")
    demo.add_argument("--out", type=Path, help="folder for logs and traces (default: a temporary one)")
    demo.add_argument("server_flags", nargs="*", metavar="-- FLAG", help="flags passed on to every server, after --")
    bench = commands.add_parser("bench", help="run SGLang's bench_serving against each mode")
    bench.add_argument("--target", help="model path (default: the embedded tiny target)")
    bench.add_argument("--draft", help="draft model path (default: the embedded tiny draft)")
    bench.add_argument("--num-steps", type=int, default=3, help="drafts per round (default 3)")
    bench.add_argument("--concurrency", type=int, default=8, help="requests in flight (default 8)")
    bench.add_argument("--num-prompts", type=int, default=48, help="requests per arm (default 48)")
    bench.add_argument("--output-len", type=int, default=64, help="tokens per answer (default 64)")
    bench.add_argument("--out", type=Path, help="write the figures there as JSON")
    bench.add_argument("server_flags", nargs="*", metavar="-- FLAG", help="flags passed on to every server, after --")
    check = commands.add_parser("check", help="hold the hook ledger against the installed SGLang")
    check.add_argument("--verbose", action="store_true", help="print every entry, not only misfits")
    check.add_argument("--fingerprint", action="store_true", help="print the fingerprint of every target and exit")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = build_parser().parse_args(argv)
    if args.command == "demo":
        return _demo(args)
    if args.command == "bench":
        return _bench(args)
    from sglang_psd.ledger import run_check

    return run_check(verbose=args.verbose, fingerprints_only=args.fingerprint)


def _demo(args: argparse.Namespace) -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from sglang_psd.demo.run import DemoOptions, run_demo

    options = DemoOptions(
        num_steps=args.num_steps,
        requests=args.requests,
        max_tokens=args.max_tokens,
        extra=args.server_flags,
        out=args.out,
    )
    _choose_models(options, args)
    return run_demo(options)


def _bench(args: argparse.Namespace) -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from sglang_psd.bench import BenchOptions, run_bench

    options = BenchOptions(
        num_steps=args.num_steps,
        concurrency=args.concurrency,
        num_prompts=args.num_prompts,
        output_len=args.output_len,
        extra=args.server_flags,
        out=args.out,
    )
    _choose_models(options, args)
    return run_bench(options)


def _choose_models(options, args: argparse.Namespace) -> None:
    options.target = args.target or options.target
    options.draft = args.draft or options.draft


if __name__ == "__main__":
    sys.exit(main())
