"""Taken in each process of a server: when chosen functions began and ended.

``sitecustomize`` imports this where ``PSD_STAMPS`` names a folder; every process that runs one of the functions writes
a file there. Nothing of the product knows of it. A stamp takes about a microsecond.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import threading
import time
from collections import deque
from functools import wraps
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("PSD_STAMPS", "")
KEPT = 200_000
WRITE_EVERY_S = 2.0

# Module, class, methods. One round is what lies between two ends of ``ROUND_ENDS``.
ROUND_ENDS = "ForwardTimer.wait"
SIZED = "PSDWorker._verify"  # its batch says how many requests the round has
FUNCTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "sglang.srt.managers.scheduler": {"Scheduler": ("process_batch_result", "run_batch")},
    "sglang.srt.managers.tp_worker": {"TpModelWorker": ("forward_batch_generation",)},
    "sglang_psd.scheduler.drafting": {
        "DraftingMixin": ("_psd_settle", "_psd_commit_early", "_psd_commit_rest", "_psd_open"),
    },
    "sglang_psd.scheduler.drafts": {"DraftClient": ("_accept", "take", "commit")},
    "sglang_psd.scheduler.mixin": {"PSDSchedulerMixin": ("_psd_plan", "_psd_launch", "_psd_refresh_lengths")},
    "sglang_psd.scheduler.records": {"RecordsMixin": ("_psd_write_down",)},
    "sglang_psd.scheduler.recovery": {"RecoveryMixin": ("_psd_supervise",)},
    "sglang_psd.scheduler.timing": {"ForwardTimer": ("wait",)},
    "sglang_psd.target.sampler": {"ChunkSampler": ("sample",)},
    "sglang_psd.target.worker": {"PSDWorker": ("_prepare", "_fetch_drafts", "_verify")},
    "sglang_psd.drafter.chain": {"Chain": ("to_host",)},
    "sglang_psd.drafter.engine": {"DraftEngine": ("draft", "draft_known", "use_pause")},
    "sglang_psd.drafter.graphs": {"ChainGraphs": ("run", "_plan")},
    "sglang_psd.drafter.serve": {"DrafterLoop": ("_send",)},
}

_stamps: deque[tuple[str, float, float, int]] = deque(maxlen=KEPT)


def _stamped(label: str, function: Any) -> Any:
    @wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        size = len(args[1].reqs) if label == SIZED else 0
        begin = time.monotonic()
        try:
            return function(*args, **keywords)
        finally:
            _stamps.append((label, begin, time.monotonic(), size))

    return wrapper


class _Finder(importlib.abc.MetaPathFinder):
    """Loads the modules above as usual and puts the stamps on."""

    def __init__(self) -> None:
        self._writing = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in FUNCTIONS else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_stamp(module: Any) -> None:
            load(module)
            for owner, methods in FUNCTIONS[name].items():
                for method in methods:
                    setattr(
                        getattr(module, owner),
                        method,
                        _stamped(f"{owner}.{method}", vars(getattr(module, owner))[method]),
                    )
            if not self._writing:
                self._writing = True
                threading.Thread(target=_keep_writing, name="psd-stamps", daemon=True).start()

        spec.loader.exec_module = load_and_stamp  # type: ignore[method-assign]
        return spec


def _keep_writing() -> None:
    file = Path(FOLDER, f"{os.getpid()}.json")
    while True:
        time.sleep(WRITE_EVERY_S)
        if _stamps:
            beside = file.with_suffix(".new")
            beside.write_text(json.dumps(list(_stamps)))
            beside.replace(file)


def install() -> None:
    """Put stamps on what this process imports from now on."""
    if FOLDER:
        sys.meta_path.insert(0, _Finder())
