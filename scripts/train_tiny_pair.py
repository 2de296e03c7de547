"""Make the tiny target and draft models that the repository carries, and measure them.

Three steps::

    python scripts/train_tiny_pair.py data --docs DIR --speeches DIR --novel DIR --plays FILE --out DATA
    python scripts/train_tiny_pair.py train --data DATA --out MODELS
    python scripts/train_tiny_pair.py eval --models MODELS --data DATA --out docs/results/tiny_pair.json

``docs/tiny_pair.md`` says where the texts come from. Seeds are fixed; the result is the same up to the
rounding of the accelerator.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def run_data(args: argparse.Namespace) -> None:
    """Tokenise the texts."""
    from tiny_pair import corpus, data

    documents = [
        *corpus.read_docs(args.docs),
        *corpus.read_stdlib(),
        *corpus.read_speeches(args.speeches),
        *corpus.read_novel(args.novel),
        *corpus.read_plays(args.plays),
    ]
    print(json.dumps(data.build(documents, args.out, args.seed), indent=1))


def run_train(args: argparse.Namespace) -> None:
    """Train the target, let it answer, and train the draft on its answers."""
    from tiny_pair import training

    steps = training.Steps(args.target_steps, args.unloop_steps, args.answers, args.draft_steps, args.smoke)
    training.train_pair(args.data, args.out, steps, args.seed, (args.target_from, args.draft_from))


def run_eval(args: argparse.Namespace) -> None:
    """Measure accept lengths, losses and sizes of a saved pair."""
    from tiny_pair import evaluate

    command = "python " + shlex.join(["scripts/train_tiny_pair.py", *sys.argv[1:]])
    report = {"command": command, **evaluate.evaluate_pair(args.models, args.data, args.limit)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "samples"}, indent=1))


def main() -> None:
    """Parse the command line and run one step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    steps = parser.add_subparsers(required=True)
    step = steps.add_parser("data", help=run_data.__doc__)
    step.add_argument("--docs", type=Path, required=True, help="reStructuredText sources of the Python documentation")
    step.add_argument("--speeches", type=Path, required=True, help="State of the Union addresses (JSON files)")
    step.add_argument("--novel", type=Path, required=True, help="chapters of Moby-Dick (JSON files)")
    step.add_argument("--plays", type=Path, required=True, help="Shakespeare's works, one text file")
    step.add_argument("--out", type=Path, required=True)
    step.add_argument("--seed", type=int, default=0)
    step.set_defaults(run=run_data)
    step = steps.add_parser("train", help=run_train.__doc__)
    step.add_argument("--data", type=Path, required=True)
    step.add_argument("--out", type=Path, required=True)
    step.add_argument("--target-steps", type=int, default=2000, help="steps on text and chats; 0: none")
    step.add_argument("--unloop-steps", type=int, default=450, help="steps out of loops; 0: none")
    step.add_argument("--answers", type=int, default=9216, help="answers that the draft is trained on")
    step.add_argument("--draft-steps", type=int, default=3000, help="steps of the draft; 0: none")
    step.add_argument("--target-from", type=Path, help="folder of a saved pair whose target to start from")
    step.add_argument("--draft-from", type=Path, help="folder of a saved pair whose draft to start from")
    step.add_argument("--seed", type=int, default=0)
    step.add_argument("--smoke", action="store_true", help="a few tiny steps, to try the code without an accelerator")
    step.set_defaults(run=run_train)
    step = steps.add_parser("eval", help=run_eval.__doc__)
    step.add_argument("--models", type=Path, required=True, help="folder holding tiny-target and tiny-draft")
    step.add_argument("--data", type=Path, required=True)
    step.add_argument("--out", type=Path, required=True)
    step.add_argument("--limit", type=int, default=192, help="number of held-out prompts")
    step.set_defaults(run=run_eval)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
