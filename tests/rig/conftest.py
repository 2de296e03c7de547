"""Loads SGLang and its plugins into the test process, once; every case is a fork of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.rig.oracle import Oracle


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is a rig test."""
    for item in items:
        if "tests/rig/" in item.path.as_posix():
            item.add_marker(pytest.mark.rig)


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


@pytest.fixture(scope="session")
def oracle(run_case: Callable[..., Any], models: Path) -> Oracle:
    """What plain SGLang answers."""
    from tests.rig.oracle import Oracle

    return Oracle(run_case, models)
