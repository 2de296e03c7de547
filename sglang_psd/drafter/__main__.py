"""``python -m sglang_psd.drafter SPEC``: what the scheduler spawns."""

import os
import sys

from sglang_psd.drafter.serve import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip interpreter teardown: CUDA and gloo threads have nothing left to do and may be slow to join.
    os._exit(code)
