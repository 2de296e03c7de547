"""Where a measurement was made: versions, GPUs, and the variables that steer SGLang."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

PACKAGES = ("sglang-psd", "sglang", "torch", "flashinfer-python", "transformers", "triton")
STEERING = ("SGLANG_", "CUDA_", "NCCL_", "OMP_NUM_THREADS")


def gpu_names() -> list[str]:
    """Names of the GPUs that a server started from here would see."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    names = [line.strip() for line in said.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[: len([part for part in visible.split(",") if part.strip()])]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Versions, hardware and steering variables as JSON."""
    return {
        "gpus": gpu_names(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in PACKAGES},
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(STEERING)},
    }
