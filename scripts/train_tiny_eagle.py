"""Train the EAGLE-3 head of the tiny target that the repository carries, and measure it.

    python scripts/train_tiny_eagle.py --data DATA --out sglang_psd/models/tiny-eagle3 \\
        --report docs/results/tiny_eagle3.json

``DATA`` is the output of ``scripts/train_tiny_pair.py data``. The head learns from the target's greedy answers, its own
output fed back for several steps. Needs an accelerator, PyTorch, Transformers and safetensors.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def main() -> None:
    """Parse the command line, train, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    models = HERE.parent / "sglang_psd" / "models"
    parser.add_argument("--data", type=Path, required=True, help="output of `train_tiny_pair.py data`")
    parser.add_argument("--target", type=Path, default=models / "tiny-target")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--report", type=Path, required=True, help="JSON file of the measurement")
    parser.add_argument("--answers", type=int, default=24576, help="answers of the target that the head is trained on")
    parser.add_argument("--answers-file", type=Path, help="keeps the answers for another run; beside --out by default")
    parser.add_argument("--skip-answers", type=int, default=0, help="leave the answers of an earlier run out")
    parser.add_argument("--init-from", type=Path, help="go on from this head")
    parser.add_argument("--init-report", type=Path, help="report of the run that made it, kept in the new one")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64, help="answers per step")
    parser.add_argument("--chain-steps", type=int, default=5, help="draft tokens of a chain in training")
    parser.add_argument("--draft-vocab", type=int, default=1536, help="size of the draft vocabulary")
    parser.add_argument("--intermediate-size", type=int, default=896)
    parser.add_argument("--layers", type=int, nargs=3, default=[1, 3, 6], help="layers of the target that it reads")
    parser.add_argument("--limit", type=int, default=128, help="number of held-out prompts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.answers_file = args.answers_file or args.out.parent / "eagle_answers.npz"

    from tiny_pair import eagle_training

    command = "python " + shlex.join(["scripts/train_tiny_eagle.py", *sys.argv[1:]])
    report = {"command": command, **eagle_training.train_and_measure(args)}
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
