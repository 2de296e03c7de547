"""Loads SGLang and its plugins into the test process, once; every case is a fork of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.rig.oracle import Oracle

# What building a scheduler and a drafter imports late: seconds per case, unless the test process has it already.
PRELOADED = (
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "sglang.srt.model_loader.loader",
    "sglang_psd.drafter.engine",
    "sglang_psd.drafter.serve",
    "sglang_psd.scheduler.psd_scheduler",
    "sglang_psd.target.worker",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is a rig test."""
    for item in items:
        if "tests/rig/" in item.path.as_posix():
            item.add_marker(pytest.mark.rig)


@pytest.fixture(scope="session")
def sglang_loaded() -> None:
    """Import what a scheduler needs and let SGLang load its plugins."""
    import gc

    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    # SGLang compiles its penalty kernels; a fork would call the C++ compiler for half a minute to run them twice.
    torch._dynamo.config.disable = True
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for module in PRELOADED:
        importlib.import_module(module)
    # Imported objects live for ever: a collection in a fork need not walk (and copy) them.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def run_case(sglang_loaded: None) -> Callable[..., Any]:
    """Run a function in a fork of this process: ``run_case(function, *args, timeout_s=120)``."""
    from tests.rig.fork import run_forked

    return run_forked


@pytest.fixture(scope="session")
def oracle(run_case: Callable[..., Any], models: Path) -> Oracle:
    """What plain SGLang answers."""
    from tests.rig.oracle import Oracle

    return Oracle(run_case, models)
