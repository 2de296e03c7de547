"""Shared by all tests: one thread per process, quiet libraries, and the tiny models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported anywhere: the rig forks, and a forked thread pool never wakes up. One thread is also the
# fastest setting for models of this size.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For ``make test``, which runs several test processes (pytest-xdist): what belongs to one of them, and the order.

    The end-to-end tests share servers and stay together; they take longest and begin. Every other file is a group.
    The short unit tests come last and fill up what is left.
    """
    if not hasattr(config, "workerinput"):
        return
    ranks = {"e2e": 0, "rig": 1, "unit": 2}
    for item in items:
        group = "e2e" if item.path.parent.name == "e2e" else "/".join(item.path.parts[-2:])
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: ranks.get(item.path.parent.name, 1))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the models of ``tests/models.py``."""
    from tests.models import build_models

    return build_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def sglang_loaded() -> None:
    """SGLang and its plugins are in this process."""
    from tests.rig.preload import preload

    preload()


@pytest.fixture(scope="session")
def run_case(sglang_loaded: None) -> Callable[..., Any]:
    """Run a function in a fork of this process: ``run_case(function, *args, timeout_s=120)``."""
    from tests.rig.fork import run_forked

    return run_forked
