"""The GPU's kernels say what their readable twins say: here in Triton's interpreter, in tests/gpu compiled."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# The interpreter is chosen when Triton is imported, so it gets a process of its own.
CHECK = """
import json
import os

os.environ["TRITON_INTERPRET"] = "1"
from tests import kernel_cases

print(json.dumps(kernel_cases.run("cpu")))
"""


def test_kernels_agree_with_their_references() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["law_cases"] > 20 and report["noise_cases"] > 5
    assert report["failures"] == []
