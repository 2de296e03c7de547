"""What the standby of a running server takes."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import psutil

from scripts.faults.strikes import standbys_of

SETTLED_S = 2.0


def gpu_memory_mb() -> int | None:
    """Memory in use on all GPUs together, as their driver counts it; None without GPUs."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return sum(int(line) for line in lines)


def standby_cost(drafter: psutil.Process) -> dict[str, Any]:
    """Memory of the drafter's standby, on the host and on the GPUs (by what is freed when it is killed), in MB.

    The server must be idle, and no other program may come or go on its GPUs.
    """
    (standby,) = standbys_of(drafter)
    resident_mb, before_mb = round(standby.memory_info().rss / 2**20), gpu_memory_mb()
    standby.kill()
    psutil.wait_procs([standby], timeout=SETTLED_S)
    time.sleep(SETTLED_S)
    after_mb = gpu_memory_mb()
    gpu_mb = None if before_mb is None or after_mb is None else before_mb - after_mb
    return {"resident_mb": resident_mb, "gpu_mb": gpu_mb}
